"""Loads a model, or a rank's share of it: packed weights from a cache, or a checkpoint.

This module, and all that it imports, has none of transformers' modelling code. It takes seconds to
import; only a start that reads a checkpoint needs it (``checkpoint.py``).
"""

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rayfin.actors.config import BatchLimits, EngineArgs, EngineConfig, ModelFacts, resolve_limits
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.media.kinds import media_kind, served_media
from rayfin.actors.model_files.plain_config import known_config
from rayfin.actors.model_files.pooling_folder import read_recipe
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.parts import P, PartFacts, first_of, uncut_of
from rayfin.actors.runner.cpu.decoder_cache import DecoderCache, Facts
from rayfin.actors.runner.cpu.stored_config import StoredConfig
from rayfin.actors.runner.models.config import load_config, max_position
from rayfin.actors.runner.models.dtypes import PAGE_TYPES, page_type
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import StepObserver
from rayfin.actors.runner.page_namespace import page_namespace
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.parts.grammars.masker import GrammarsPart
from rayfin.actors.runner.parts.model_part import ModelPart
from rayfin.actors.runner.parts.profile import ProfilePart
from rayfin.actors.runner.quantized.config import source_config
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.actors.runner.window_pages import frees_windows
from rayfin.actors.settings.state_snapshots import draft_states
from rayfin.actors.weights.version import WeightVersion
from rayfin.cache.kv_tensors import KVLayout, KVTensors, LayerGroups, group_layers, page_bytes
from rayfin.kernels.attention.select import ON_TRITON, page_types, select_attention
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels
from rayfin.kernels.cpu.library import try_load
from rayfin.kernels.triton.available import can_use_triton

if TYPE_CHECKING:  # each of them imports modelling code, Triton, or all classes of configurations
    from transformers import PretrainedConfig

    from rayfin.actors.runner.gpu.prompt_graphs import Recordable
    from rayfin.actors.runner.models.recurrent import RecurrentLayers
    from rayfin.actors.runner.parallel.groups import ProcessGroups
    from rayfin.actors.runner.sampling.sampler import StepSampler


BASE = WeightVersion()

ONE_THREAD_PARAMETERS = 32_000_000
"""Models with fewer parameters compute on one thread unless ``threads`` is given."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and what was decided with it."""

    device: torch.device
    config: "PretrainedConfig | StoredConfig"
    model: StepModel
    gpu_model: "Recordable | None"  # the same model, if CUDA graphs can record it
    page_type: torch.dtype
    kernels: CpuKernels | None
    peers: "ProcessGroups | None"  # of a rank among several
    recurrent: "RecurrentLayers | None" = None  # layers that keep a state per request
    parts: tuple[ModelPart, ...] = ()  # what it has beside its decoder, the inner ones first
    page_types: tuple[torch.dtype, ...] = ()  # that its attention reads
    int4_saves: int = 0  # bytes of weights that quantization "int4" would free
    parameters: int = 0  # of the checkpoint
    position_offset: int = 0  # positions of an encoder before that of the first token
    chooses_keys: bool = False  # tokens see the keys that an index chooses
    whole_prompts: bool = False  # an encoder
    decoder: StepModel | None = None  # the model inside of its parts, where it is on its kernels
    frees_windows: bool = False  # pages of layers with windows are freed behind these

    @property
    def groups(self) -> LayerGroups | None:
        """The groups of layers with pages of their own; None: all layers are one."""
        # A draft's layers read the table of those that see all.
        drafts = any(part.token_layers is not None for part in self.parts)
        return group_layers(self.model.layouts) if self.frees_windows and not drafts else None

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request."""
        return 0 if self.recurrent is None else self.recurrent.bytes_per_row

    @property
    def fixed_bits(self) -> bool:
        """Whether logits do not depend on the other rows of a step."""
        on_kernels = self.kernels is not None and not self.chooses_keys
        return self.device.type != "cpu" or on_kernels

    def part(self, kind: type[P]) -> P | None:
        """Returns its part of a kind, or None."""
        return first_of(self.parts, kind)

    @property
    def part_facts(self) -> tuple[PartFacts, ...]:
        """What the scheduler and ingresses must know of its parts."""
        return tuple(part.facts for part in self.parts if part.facts is not None)

    @property
    def samples(self) -> bool:
        """Whether its logits become tokens."""
        return all(part.samples for part in self.parts)

    def make_sampler(self, rows: int) -> "StepSampler | None":
        """Returns what a part makes of a forward in place of tokens; None: they are sampled."""
        samplers = (part.make_sampler(rows) for part in self.parts)
        return next((sampler for sampler in samplers if sampler is not None), None)

    def facts(self, args: EngineArgs, available: int, share: int = 0) -> ModelFacts:
        """Returns what ``resolve`` must know, with ``available`` of ``share`` bytes for pages."""
        config = self.config
        return ModelFacts(
            architecture=(config.architectures or [type(config).__name__])[0],
            vocab_size=config.get_text_config(decoder=True).vocab_size,
            max_position=self.max_position,
            page_bytes=self.page_bytes(args.page_size),
            available_bytes=available,
            share_bytes=share,
            state_bytes=self.state_bytes,
            device=self.device.type,
            whole_prompts=self.whole_prompts,
            fixed_bits=self.fixed_bits,
            pools=not self.samples,
            smaller_pages=self.smaller_pages(args.page_size),
            int4_saves=self.int4_saves,
            parts=self.part_facts,
            page_namespace="" if args.kv_disk_path is None else page_namespace(args, self),
            windows=None if (groups := self.groups) is None else groups.windows,
        )

    def limits(self, args: EngineArgs, model_len: int) -> BatchLimits:
        """Of a step on this device, for requests of ``model_len`` tokens."""
        return resolve_limits(
            args,
            self.device.type,
            model_len,
            uncut_of(self.part_facts),
            whole_prompts=self.whole_prompts,
            row_by_row=self.recurrent is not None,
        )

    def bytes_of_requests(self, args: EngineArgs, limits: BatchLimits) -> int:
        """Bytes that running requests take beside their pages, and what is beside those."""
        drafts = draft_states(args, limits, self.device.type)
        return self.bytes_beside_pages(limits.max_decoding_batch) + drafts * self.state_bytes

    def bytes_beside_pages(self, rows: int) -> int:
        """Bytes of the states of ``rows`` requests, and of what parts keep."""
        of_row = 2 * self.state_bytes + sum(part.bytes_per_request for part in self.parts)
        return rows * of_row + sum(facts.num_bytes for facts in self.part_facts)

    @property
    def observers(self) -> list[StepObserver]:
        """What follows the steps for the model's sake."""
        return [observer for part in self.parts for observer in part.observers]

    @property
    def max_position(self) -> int | None:
        """The number of positions of the model, or None if it has no limit."""
        if isinstance(self.config, StoredConfig):
            positions = self.config.max_position_embeddings
        else:
            positions = max_position(self.config)
        if positions is not None:
            positions -= self.position_offset
        limits = [positions, *(part.max_tokens for part in self.parts)]
        return min((limit for limit in limits if limit is not None), default=None)

    def checked(self, cache: KVTensors) -> KVTensors:
        """The layers of ``cache`` that decide tokens."""
        layers = [part.token_layers for part in self.parts if part.token_layers is not None]
        return cache.layers(0, min(layers)) if layers else cache

    @property
    def _page_layouts(self) -> list[KVLayout]:
        """What a page holds: that of one group."""
        layouts, groups = self.model.layouts, self.groups
        return layouts if groups is None else layouts[: groups.size]

    def page_bytes(self, page_size: int) -> int:
        return page_bytes(self._page_layouts, page_size, self.page_type)

    def smaller_pages(self, page_size: int) -> tuple[tuple[str, int], ...]:
        """Values of ``kv_cache_dtype`` with smaller pages, and bytes of a page."""
        return tuple(
            (name, page_bytes(self._page_layouts, page_size, dtype))
            for name, dtype in PAGE_TYPES.items()
            if dtype in self.page_types and dtype.itemsize < self.page_type.itemsize
            if name not in ("float16", "fp8_e4m3")  # as large as another one
        )

    def bind(self, num_pages: int, page_size: int) -> KVTensors:
        """Allocates the pages; the model keeps its keys and values there from now on."""
        model = self.model
        sizes = num_pages, page_size, self.page_type, self.device
        cache = KVTensors(model.layouts, *sizes, groups=self.groups)
        model.bind(cache)
        return cache

    def allocate_states(self, config: EngineConfig) -> StateTensors | None:
        """Allocates the states of an engine; None if there are none."""
        slots = config.limits.max_decoding_batch
        return self.bind_states(slots, config.num_snapshots, config.num_draft_states)

    def bind_states(self, slots: int, snapshots: int, drafts: int = 0) -> StateTensors | None:
        """Allocates the states of ``slots`` requests and so many drafts; None if there are none."""
        if self.recurrent is None:
            return None
        states = StateTensors(self.recurrent.layouts, slots, snapshots, self.device, drafts)
        self.recurrent.bind(states)
        return states

    @property
    def states(self) -> StateTensors | None:
        """The states that are allocated; None if the model keeps none."""
        return None if self.recurrent is None else self.recurrent.states

    def host_pages(self, config: EngineConfig | None, page_size: int) -> KVTensors:
        """Pages in host memory, pinned if a GPU copies to and from it; None: there are none."""
        offloaded = 0 if config is None else config.num_offloaded_pages
        num_pages = 0 if config is None else config.num_host_pages + offloaded
        pinned = num_pages > 0 and self.device.type == "cuda"
        host, layouts = torch.device("cpu"), self.model.layouts
        try:
            sizes = num_pages, page_size, self.page_type, host
            return KVTensors(layouts, *sizes, pinned=pinned, groups=self.groups)
        except (RuntimeError, MemoryError) as error:
            field = "kv_offloading_size" if offloaded else "swap_space"
            raise InvalidConfig(f"{field} could not be taken: {error}", field) from None


def load(
    args: EngineArgs, place: ParallelRank | None = None, version: WeightVersion = BASE
) -> LoadedModel:
    """Loads the model, or the share of the rank ``place``; then all ranks call this at once.

    Raises:
        InvalidConfig, UnsupportedModel: the model cannot be served.
    """
    loaded = _load(args, place) if version.is_base else _load_version(args, place, version)
    loaded = replace(loaded, frees_windows=frees_windows(args, loaded))
    if args.activations == "bfloat16":  # from now on: a load compares exact products
        _round_rows(loaded.kernels)
    if args.profile_dir is not None:
        loaded = replace(loaded, parts=(*loaded.parts, ProfilePart(args.profile_dir)))
    if not loaded.samples or (place is not None and not place.is_last):  # it has no logits
        return loaded
    size = loaded.config.get_text_config(decoder=True).vocab_size
    grammars = GrammarsPart(args, size, limited=place is None)
    return replace(loaded, parts=(*loaded.parts, grammars))


def _load_version(
    args: EngineArgs, place: ParallelRank | None, version: WeightVersion
) -> LoadedModel:
    """The model with a version's weights: over packed ones of the base, if they are there."""
    # Here, for it imports transformers' modelling code.
    from rayfin.actors.runner.weights.load import model_folder, require_content
    from rayfin.actors.runner.weights.refill import Refiller, can_refill

    require_content(version)
    if place is None and args.weights_folder is not None and holds_weights(args):
        loaded = _load(args, place)
        if can_refill(loaded, args):
            Refiller(loaded, args).refill(version)
            return loaded
        del loaded
    with model_folder(args, version) as version_args:
        return _load(version_args, place)


def _load(args: EngineArgs, place: ParallelRank | None) -> LoadedModel:
    device = pick_device(args.device)
    ranks = 1 if place is None else place.size
    rounded = None if args.quantization == "dequantize" else args.quantization
    if rounded:
        _require_quantisable(args, device)
    if args.activations == "fp8" and not can_use_triton(device):
        raise InvalidConfig("activations 'fp8' is for a GPU", "activations")
    recipe = read_recipe(args)
    cache = _cache_of(args, device) if recipe is None and ranks == 1 else None
    cached = None if cache is None else _find(args, device, cache)
    if cached is not None:
        return cached
    config = load_config(args, recipe)
    _check_quantization(args, config, recipe)
    _check_parts(args, config, recipe, ranks)
    # Here, for it imports transformers' modelling code.
    from rayfin.actors.runner.checkpoint import load_checkpoint

    loaded = load_checkpoint(args, config, device, place, recipe)
    if cache is None or not cache.follows(args):
        return loaded
    stored = StoredConfig.of(config, max_position(config))
    return _keep(cache, loaded, stored)


def holds_weights(args: EngineArgs) -> bool:
    """Whether packed weights are there for these settings, of a model that generates.

    Raises:
        InvalidConfig, UnsupportedModel: the model cannot be served.
    """
    cache = _cache_of(args, pick_device(args.device))
    return cache is not None and cache.holds()


def _cache_of(args: EngineArgs, device: torch.device) -> DecoderCache | None:
    """The place of the model's packed weights, if they are kept.

    The name of one that is a decoder for certain follows from config.json as it is written: its
    configuration class takes longer to import than the weights take to map.
    """
    if args.weights_folder is None:
        return None
    values = known_config(args)
    if values is not None and "quantization_config" not in values:
        return DecoderCache.of(args, device, values)
    config = load_config(args)
    return DecoderCache.of(args, device, config.to_dict(), media=media_kind(config) is not None)


def _find(args: EngineArgs, device: torch.device, cache: DecoderCache) -> LoadedModel | None:
    """The model from the cache, as it was when it had been loaded and compared; or None."""
    cached = cache.find(lambda parameters: cpu_kernels(args, parameters))
    if cached is None:
        return None
    decoder, kernels, facts = cached
    torch.set_num_threads(1)
    kernel = select_attention(device, decoder.dtype, args.attention, kernels)
    pages = page_type(args.kv_cache_dtype, decoder.dtype, kernel)
    # A draft model or head is compared with the whole configuration.
    drafts = args.speculation is not None and args.speculation.one_device
    config = load_config(args) if drafts else facts.config
    return LoadedModel(
        *(device, config, decoder, None, pages, kernels, None),
        page_types=tuple(page_types(kernel)),
        int4_saves=facts.int4_saves,
        parameters=facts.parameters,
        decoder=decoder,
    )


def _keep(cache: DecoderCache, loaded: LoadedModel, config: StoredConfig) -> LoadedModel:
    """The same, over weights that other processes can share if the cache can keep them."""
    facts = Facts(loaded.parameters, loaded.int4_saves, config)
    kernels = loaded.kernels
    if kernels is None:
        return loaded
    model = cache.keep(loaded.model, kernels, facts, config.max_position_embeddings)
    return replace(loaded, model=model, decoder=model)


def _check_quantization(
    args: EngineArgs, config: "PretrainedConfig", recipe: PoolingRecipe | None
) -> None:
    """Refuses quantization that does not go with the kind of model."""
    rounded = args.quantization if args.quantization != "dequantize" else None
    if rounded and (source := source_config(config)) is not None:
        raise InvalidConfig(
            f"quantization {rounded!r} rounds plain weights, and {args.model} holds quantized ones "
            f"({source.get('quant_method')}); leave it out, or 'dequantize' them",
            "quantization",
        )
    if rounded and pick_device(args.device).type != "cpu":
        if recipe is not None or served_media(args, config) is not None:
            raise InvalidConfig(
                f"quantization {rounded!r} is for models of text that generate, on a GPU",
                "quantization",
            )


def _check_parts(
    args: EngineArgs, config: "PretrainedConfig", recipe: PoolingRecipe | None, ranks: int
) -> None:
    """Refuses settings that the parts of a model, which ``ranks`` devices share, do not go with.

    Raises:
        InvalidConfig, UnsupportedModel: ``param`` is the setting.
    """
    if args.enable_prompt_embeds and (why := _why_no_embeds(args, config, recipe, ranks)):
        raise InvalidConfig(f"enable_prompt_embeds {why}", "enable_prompt_embeds")
    if recipe is not None and args.serves_adapters:
        raise InvalidConfig("enable_lora is for models that generate", "enable_lora")
    if recipe is not None and ranks > 1:
        why = "a pooling model runs on one device: use data_parallel_size"
        raise InvalidConfig(why, "tensor_parallel_size")
    if recipe is None and (args.serves_adapters or ranks > 1) and served_media(args, config):
        name = ", ".join(config.architectures or [type(config).__name__])
        if ranks > 1:
            raise UnsupportedModel(f"{name} cannot be shared by several devices", "model")
        raise UnsupportedModel(f"{name} cannot be served with LoRA adapters", "enable_lora")


def _why_no_embeds(
    args: EngineArgs, config: "PretrainedConfig", recipe: PoolingRecipe | None, ranks: int
) -> str | None:
    """Returns why prompts cannot be embeddings, or None."""
    if ranks > 1:
        return "is for one device, not for several that share a model: use data_parallel_size"
    if recipe is not None:
        return "is for models that generate"
    if not args.language_model_only and served_media(args, config) is not None:
        return "is for models of text: language_model_only serves the text of this one"
    if args.speculation is not None and args.speculation.reads_states:
        return "does not go with heads that draft: use an n-gram, suffix or draft_model method"
    return None


def reads_states(args: EngineArgs) -> bool:
    """Whether a head drafts, which reads hidden states."""
    return args.speculation is not None and args.speculation.reads_states


def cpu_kernels(args: EngineArgs, parameters: int, ranks: int = 1) -> CpuKernels | None:
    """The compiled kernels on as many threads as the settings, or the parameters, ask for.

    None where they are not built or not asked for.
    """
    threads = args.threads or default_threads(parameters, ranks)
    torch.set_num_threads(threads)
    return try_kernels(threads) if args.attention in ("auto", "cpu") else None


def _round_rows(kernels: CpuKernels | None) -> None:
    if kernels is None:
        raise InvalidConfig(
            "activations 'bfloat16' is for the compiled CPU kernels: elsewhere rows have the dtype",
            "activations",
        )
    if not kernels.round_rows():
        logger.warning("activations 'bfloat16' has no effect: it is for AMX, and AMD's AVX512-BF16")


def _require_quantisable(args: EngineArgs, device: torch.device) -> None:
    """Refuses quantization where its kernels do not run; says why."""
    why = None
    if can_use_triton(device) and args.attention in ON_TRITON:
        why = None
    elif device.type != "cpu":
        why = f"runs on the Triton kernels of a GPU, not with attention {args.attention!r}"
    elif args.attention not in ("auto", "cpu"):
        why = f"runs on the compiled CPU kernels, not with attention {args.attention!r}"
    elif try_load() is None:
        why = "runs on the compiled CPU kernels, and they are not built"
    if why:
        raise InvalidConfig(f"quantization {args.quantization!r} {why}", "quantization")


def pick_device(name: str) -> torch.device:
    """The device of a flag's value.

    Raises:
        InvalidConfig: it asks for a GPU where there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device 'cuda' asked for, and torch finds no GPU", "device")
    return torch.device(name)


def default_threads(parameters: int, ranks: int = 1) -> int:
    """Compute threads for a rank of a model on a CPU: its share of the usable cores, or one for a
    very small model.

    A step of a small model is over before its threads have found each other, and beside a busy
    HTTP process a thread that waits for a core holds up the others (docs/benchmarks/channel.md).
    """
    return max(usable_cores() // ranks, 1) if parameters >= ONE_THREAD_PARAMETERS else 1


def usable_cores() -> int:
    """Cores that this process may run on (a container's share, not the machine's)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""Loads a model, or a rank's share of it, and puts it on the kernels of its device."""

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rayfin.actors.adapters.files import read_ref
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, RayfinError, UnsupportedModel
from rayfin.actors.images.processor import serves_images
from rayfin.actors.pooling.folder import read_recipe
from rayfin.actors.pooling.recipe import PoolingRecipe
from rayfin.actors.runner.cpu.decoder import TOLERANCE, CpuDecoder, build_cpu_decoder
from rayfin.actors.runner.cpu.decoder_cache import DecoderCache, Facts
from rayfin.actors.runner.cpu.packed_layers import pack_linears
from rayfin.actors.runner.cpu.recurrent_rows import fuse_recurrent
from rayfin.actors.runner.embeds.load import EmbedsParts, require_embeds
from rayfin.actors.runner.lora.adapted_decoder import AdaptedDecoder, can_adapt
from rayfin.actors.runner.lora.adapted_model import AdaptedModel
from rayfin.actors.runner.lora.reader import layer_sizes
from rayfin.actors.runner.lora.store import AdapterStore, Fetch
from rayfin.actors.runner.models.compare import require_equal
from rayfin.actors.runner.models.narrow import widen
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel, StepModel
from rayfin.actors.runner.models.recurrent import RecurrentLayers
from rayfin.actors.runner.models.weights import (
    PAGE_TYPES,
    load_config,
    load_model,
    max_position,
    page_type,
)
from rayfin.actors.runner.observers import StepObserver
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.parallel.shard_weights import load_share
from rayfin.actors.runner.pooling.encoder_model import EncoderModel
from rayfin.actors.runner.pooling.headless import HeadlessDecoder
from rayfin.actors.runner.pooling.load import (
    PoolingParts,
    load_decoder,
    load_encoder,
    require_alone,
)
from rayfin.actors.runner.quantized.loader import dequantize, source_config
from rayfin.actors.runner.quantized.packed import (
    int4_saves,
    pack_quantized,
    quantized_parameters,
    rounds_rows,
)
from rayfin.actors.runner.step.state_tensors import StateTensors
from rayfin.actors.runner.vision.load import VisionParts, load_vision, require_equal_images
from rayfin.actors.runner.vision.text_view import TextView
from rayfin.actors.settings.choices import Quantization
from rayfin.actors.settings.lora_limits import adapter_budget, loras_in_memory
from rayfin.actors.settings.uncut import Uncut
from rayfin.actors.timing import MODEL_LOAD_SECONDS
from rayfin.cache.kv_tensors import KVTensors, page_bytes
from rayfin.kernels.attention.select import SeeingAhead, page_types, select_attention
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels
from rayfin.kernels.cpu.library import try_load
from rayfin.kernels.shapes import PagedAttention
from rayfin.kernels.triton.available import can_use_triton

if TYPE_CHECKING:
    from rayfin.actors.runner.gpu.decoder import GpuDecoder

logger = logging.getLogger(__name__)

ONE_THREAD_PARAMETERS = 32_000_000
"""Models with fewer parameters compute on one thread unless ``threads`` is given."""


@dataclass(frozen=True, slots=True)
class DraftParts:
    """What a draft model or head adds to a model."""

    token_layers: int  # layers of the cache that decide tokens; those of drafts are behind them
    waiting_bytes: int = 0  # of the states of one request that wait for a head


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and what was decided with it."""

    device: torch.device
    config: PretrainedConfig
    model: StepModel
    gpu_model: "GpuDecoder | None"  # the same model, if CUDA graphs can record it
    page_type: torch.dtype
    kernels: CpuKernels | None
    peers: ProcessGroups | None  # of a rank among several
    recurrent: RecurrentLayers | None = None  # layers that keep a state per request
    pools: PoolingParts | None = None  # of a model that gives vectors
    adapters: AdapterStore | None = None  # with enable_lora
    drafts: DraftParts | None = None  # with a draft model or head
    page_types: tuple[torch.dtype, ...] = ()  # that its attention reads
    int4_saves: int = 0  # bytes of weights that quantization "int4" would free
    vision: VisionParts | None = None  # of a model that reads images
    embeds: EmbedsParts | None = None  # with enable_prompt_embeds
    parameters: int = 0  # of the checkpoint

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request."""
        return 0 if self.recurrent is None else self.recurrent.bytes_per_row

    @property
    def whole_prompts(self) -> bool:
        """Whether it is an encoder."""
        return self.pools is not None and self.pools.recipe.encoder

    @property
    def image_token_id(self) -> int | None:
        """The id of an image's tokens, or None if the model reads text only."""
        return None if self.vision is None else self.vision.processor.image_token_id

    @property
    def embeds_size(self) -> int:
        """Numbers of each embedding of a prompt, or 0 if prompts are tokens."""
        return 0 if self.embeds is None else self.embeds.size

    @property
    def uncut(self) -> Uncut:
        """Parts of prompts that no step cuts."""
        return Uncut() if self.vision is None else self.vision.uncut

    def bytes_beside_pages(self, rows: int) -> int:
        """Bytes of the states of ``rows`` requests, of embeddings of images, and of adapters."""
        images = 0 if self.vision is None else self.vision.cache_bytes
        waiting = 0 if self.drafts is None else self.drafts.waiting_bytes
        return rows * (2 * self.state_bytes + waiting) + images + self.adapter_bytes

    @property
    def adapter_bytes(self) -> int:
        """Bytes that are kept for adapters."""
        return 0 if self.adapters is None else self.adapters.budget

    @property
    def observers(self) -> list[StepObserver]:
        """What follows the steps for the model's sake."""
        found: list[StepObserver] = [] if self.adapters is None else [self.adapters]
        found += [parts.slots for parts in (self.vision, self.embeds) if parts is not None]
        return found if self.vision is None else [*found, self.vision.encoder]

    @property
    def max_position(self) -> int | None:
        """The number of positions of the model, or None if it has no limit."""
        positions = max_position(self.config)
        if positions is not None and isinstance(self.model, EncoderModel):
            positions -= self.model.position_offset
        if self.pools is None or self.pools.recipe.max_tokens is None:
            return positions
        return min(positions or self.pools.recipe.max_tokens, self.pools.recipe.max_tokens)

    def checked(self, cache: KVTensors) -> KVTensors:
        """The layers of ``cache`` that decide tokens: not those of a draft model."""
        return cache if self.drafts is None else cache.layers(0, self.drafts.token_layers)

    def page_bytes(self, page_size: int) -> int:
        return page_bytes(self.model.layouts, page_size, self.page_type)

    def smaller_pages(self, page_size: int) -> tuple[tuple[str, int], ...]:
        """Values of ``kv_cache_dtype`` with smaller pages, and bytes of a page."""
        return tuple(
            (name, page_bytes(self.model.layouts, page_size, dtype))
            for name, dtype in PAGE_TYPES.items()
            if dtype in self.page_types and dtype.itemsize < self.page_type.itemsize
            if name not in ("float16", "fp8_e4m3")  # as large as another one
        )

    def bind(self, num_pages: int, page_size: int) -> KVTensors:
        """Allocates the pages; the model keeps its keys and values there from now on."""
        model = self.model
        cache = KVTensors(model.layouts, num_pages, page_size, self.page_type, self.device)
        model.bind(cache)
        return cache

    def bind_states(self, slots: int, snapshots: int) -> StateTensors | None:
        """Allocates the states of ``slots`` requests; None if the model keeps none."""
        if self.recurrent is None:
            return None
        states = StateTensors(self.recurrent.layouts, slots, snapshots, self.device)
        self.recurrent.bind(states)
        return states

    def host_pages(self, num_pages: int, page_size: int) -> KVTensors:
        """Swap space: pages in host memory, pinned if a GPU copies to and from it."""
        pinned = num_pages > 0 and self.device.type == "cuda"
        host, layouts = torch.device("cpu"), self.model.layouts
        try:
            return KVTensors(layouts, num_pages, page_size, self.page_type, host, pinned=pinned)
        except (RuntimeError, MemoryError) as error:
            raise InvalidConfig(f"swap_space could not be taken: {error}", "swap_space") from None


def load(
    args: EngineArgs, place: ParallelRank | None = None, fetch: Fetch = read_ref
) -> LoadedModel:
    """Loads the model, or the share of the rank ``place``; then all ranks call this at once.

    ``fetch`` gets the files of adapters.

    Raises:
        InvalidConfig, UnsupportedModel: the model cannot be served.
    """
    device = pick_device(args.device)
    ranks = 1 if place is None else place.size
    rounded = None if args.quantization == "dequantize" else args.quantization
    if rounded:
        _require_quantisable(args, device, ranks)
    recipe = read_recipe(args)
    config = load_config(args, recipe)
    _check_settings(args, config, recipe, ranks)
    if recipe is not None:
        require_alone(ranks, lora=args.serves_lora)
        if recipe.encoder:
            return _load_encoder(args, config, recipe, device)
    cache = DecoderCache.of(args, config, device) if recipe is None and ranks == 1 else None
    if cache is None:
        return _load(args, config, device, place, recipe, fetch)
    found = _find(args, config, device, cache)
    return found or _keep(cache, _load(args, config, device, place, recipe, fetch))


def _load(
    args: EngineArgs,
    config: PretrainedConfig,
    device: torch.device,
    place: ParallelRank | None,
    recipe: PoolingRecipe | None,
    fetch: Fetch,
) -> LoadedModel:
    """Reads the checkpoint, and puts the model on its kernels."""
    ranks = 1 if place is None else place.size
    rounded = None if args.quantization == "dequantize" else args.quantization
    peers = None if place is None else ProcessGroups(place, device)
    stored = config.dtype
    model, layers, pools, vision = _load_weights(args, config, device, peers, recipe)
    kernels: CpuKernels | None = None
    parameters = _parameters(model)
    if device.type == "cpu":
        kernels = _cpu_kernels(args, parameters, ranks)
        if kernels and model.dtype in TOLERANCE:
            pack_quantized(model, kernels, round_rows=args.activations == "int8")
    if not kernels:
        widen(model)
    dequantize(model if vision is None else vision.model)  # what has no kernel
    _require_rounding(args, model)
    saves = int4_saves(model, stored) if kernels and args.quantization is None else 0
    try:
        kernel = select_attention(device, model.dtype, args.attention, kernels)
    except ValueError as error:
        raise InvalidConfig(str(error), "attention") from None
    if vision is not None and device.type == "cuda":
        kernel = SeeingAhead(kernel)
    pages = page_type(args.kv_cache_dtype, model.dtype, kernel)
    embeds = EmbedsParts(model, rounded=bool(rounded)) if args.enable_prompt_embeds else None
    paged = _page(model, kernel, layers, args.page_size)
    if peers is not None and paged.recurrent is not None:
        name = type(model).__name__
        raise UnsupportedModel(f"{name} cannot be shared: its layers keep states", "model")
    adapters = _adapter_store(args, paged, fetch, kernels) if args.serves_lora else None
    step_model: StepModel = paged
    gpu_model: GpuDecoder | None = None
    plain = pools is None and vision is None
    if plain and args.attention in ("auto", "triton") and can_use_triton(device):
        whole = not (peers or args.serves_lora or _reads_states(args) or embeds)
        gpu_model = _on_triton(paged, kernel, args.page_size, whole=whole)
        step_model = gpu_model or paged
    elif peers and kernels and model.dtype in TOLERANCE:
        pack_linears(paged, kernels)
    if not peers and kernels and model.dtype in TOLERANCE:
        step_model = on_cpu_kernels(paged, kernels, rounded, adapters)
    step_model = _with_parts(adapters, vision, paged, step_model, rounded=bool(rounded))
    if embeds is not None:
        step_model = embeds.admit(paged, step_model)
    return LoadedModel(
        *(device, config, step_model, gpu_model, pages, kernels, peers, paged.recurrent, pools),
        adapters=adapters,
        page_types=tuple(page_types(kernel)),
        int4_saves=saves,
        vision=vision,
        embeds=embeds,
        parameters=parameters,
    )


def _find(
    args: EngineArgs, config: PretrainedConfig, device: torch.device, cache: DecoderCache
) -> LoadedModel | None:
    """The model from the cache, as it was when it had been loaded and compared; or None."""
    found = cache.find(lambda parameters: _cpu_kernels(args, parameters))
    if found is None:
        return None
    decoder, kernels, facts = found
    torch.set_num_threads(1)
    kernel = select_attention(device, decoder.dtype, args.attention, kernels)
    pages = page_type(args.kv_cache_dtype, decoder.dtype, kernel)
    return LoadedModel(
        *(device, config, decoder, None, pages, kernels, None),
        page_types=tuple(page_types(kernel)),
        int4_saves=facts.int4_saves,
        parameters=facts.parameters,
    )


def _keep(cache: DecoderCache, loaded: LoadedModel) -> LoadedModel:
    """The same, over weights that other processes can share if the cache can keep them."""
    facts = Facts(loaded.parameters, loaded.int4_saves)
    kernels = loaded.kernels
    if kernels is None:
        return loaded
    model = cache.keep(loaded.model, kernels, facts, max_position(loaded.config))
    return replace(loaded, model=model)


def _check_settings(
    args: EngineArgs, config: PretrainedConfig, recipe: PoolingRecipe | None, ranks: int
) -> None:
    """Refuses settings that do not go with the kind of model."""
    rounded = args.quantization if args.quantization != "dequantize" else None
    if rounded and (source := source_config(config)) is not None:
        raise InvalidConfig(
            f"quantization {rounded!r} rounds plain weights, and {args.model} holds quantized ones "
            f"({source.get('quant_method')}); leave it out, or 'dequantize' them",
            "quantization",
        )
    if args.enable_prompt_embeds:
        images = serves_images(args, config) and not args.language_model_only
        pools, heads = recipe is not None, _reads_states(args)
        require_embeds(ranks=ranks, pools=pools, images=images, heads=heads)


def _adapter_store(
    args: EngineArgs, paged: PagedModel, fetch: Fetch, kernels: CpuKernels | None
) -> AdapterStore:
    """No adapters yet; the layers have their sizes still."""
    dtype = paged.dtype if args.lora_dtype == "auto" else getattr(torch, args.lora_dtype)
    sizes = layer_sizes(paged.transformer)
    per_rank = sum(inputs + outputs for inputs, outputs in sizes.values()) * dtype.itemsize
    return AdapterStore(
        sizes,
        fetch,
        most=loras_in_memory(args, paged.device.type),
        budget=adapter_budget(args, paged.device.type, per_rank),
        max_rank=args.max_lora_rank,
        dtype=dtype,
        device=paged.device,
        kernels=kernels if dtype in TOLERANCE else None,
    )


def _with_parts(
    adapters: AdapterStore | None,
    vision: VisionParts | None,
    paged: PagedModel,
    model: StepModel,
    *,
    rounded: bool,
) -> StepModel:
    """The model with adapters, or with its tower if it gives the logits that transformers gives."""
    if adapters is not None:
        if isinstance(model, CpuDecoder):
            return AdaptedDecoder(model, adapters)
        return AdaptedModel(paged, adapters)
    if vision is None:
        return model
    require_equal_images(vision, paged, model, rounded=rounded)
    return vision.around(model)


def _reads_states(args: EngineArgs) -> bool:
    """Whether a head drafts: CUDA graphs show no hidden states."""
    return args.speculation is not None and args.speculation.reads_states


def _parameters(model: PreTrainedModel) -> int:
    return int(model.num_parameters()) + quantized_parameters(model)


def _cpu_kernels(args: EngineArgs, parameters: int, ranks: int = 1) -> CpuKernels | None:
    threads = args.threads or default_threads(parameters, ranks)
    torch.set_num_threads(threads)
    return try_kernels(threads) if args.attention in ("auto", "cpu") else None


def _load_encoder(
    args: EngineArgs, config: PretrainedConfig, recipe: PoolingRecipe, device: torch.device
) -> LoadedModel:
    """An encoder: it has no pages, and its linear layers are on compiled kernels."""
    model, head = load_encoder(args, config, recipe, device)
    kernels: CpuKernels | None = None
    if device.type == "cpu":
        kernels = _cpu_kernels(args, model.transformer.num_parameters())
        if kernels and model.dtype in TOLERANCE:
            pack_linears(model, kernels)
            torch.set_num_threads(1)  # where an array is split would change bits at the seams
    widen(model.transformer)
    parts = PoolingParts(recipe, head)
    return LoadedModel(device, config, model, None, model.dtype, kernels, None, None, parts)


def _page(
    model: PreTrainedModel, kernel: PagedAttention, layers: range | None, page_size: int
) -> PagedModel:
    """The model over pages, compared with transformers unless it is a rank's share.

    Raises:
        UnsupportedModel: it cannot be served.
    """
    try:
        paged = PagedModel(model, kernel, layers)
        if layers is None and not isinstance(model, HeadlessDecoder | TextView):
            require_equal(paged, page_size)
        return paged
    except (RayfinError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises over pages
        lines = str(error).strip().splitlines() or [""]
        why = f"over pages its forward raises {type(error).__name__}: {lines[0]}"
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None):
            why = "its sparse attention keeps an index of keys beside the pages"
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: {why}", "model"
        ) from error


def _load_weights(
    args: EngineArgs,
    config: PretrainedConfig,
    device: torch.device,
    peers: ProcessGroups | None,
    recipe: PoolingRecipe | None,
) -> tuple[Any, range | None, PoolingParts | None, VisionParts | None]:
    """The model, or this rank's share of it and the layers that it has; what pools, what sees."""
    if recipe is not None:
        headless, head = load_decoder(args, config, recipe, device, ATTENTION)
        return headless, None, PoolingParts(recipe, head), None
    if serves_images(args, config):
        ranks = 1 if peers is None else peers.place.size
        view, vision = load_vision(args, config, device, ranks)
        return view, None, None, vision
    if peers is None:
        keep = args.quantization != "dequantize"
        model = load_model(args, config, device, ATTENTION, keep_quantized=keep, narrow=True)
        return model, None, None, None
    model = load_share(args, config, device, ATTENTION, peers)
    peers.connect("load", MODEL_LOAD_SECONDS)
    total = config.get_text_config(decoder=True).num_hidden_layers
    return model, peers.place.layers(total), None, None


def _on_triton(
    paged: PagedModel, attention: PagedAttention, page_size: int, *, whole: bool
) -> "GpuDecoder | None":
    """Puts the experts on Triton's kernels, and all of a ``whole`` model if it is recognized."""
    from rayfin.actors.runner.gpu.decoder import build_gpu_decoder
    from rayfin.actors.runner.gpu.experts import group_experts  # Triton is not everywhere

    group_experts(paged, page_size)
    return build_gpu_decoder(paged, attention, page_size) if whole else None


def on_cpu_kernels(
    paged: PagedModel,
    kernels: CpuKernels,
    quantization: Quantization | None,
    adapters: AdapterStore | None = None,
) -> PagedModel | CpuDecoder:
    """The model with all of it, or its linear layers, on compiled kernels."""
    if adapters is None or adapters.packs:
        decoder = build_cpu_decoder(paged, kernels, quantization)
        if decoder and (adapters is None or can_adapt(decoder, adapters)):
            torch.set_num_threads(1)  # little is left to torch, whose threads would be in the way
            return decoder
        del decoder
    fuse_recurrent(paged, kernels)
    packed = pack_linears(paged, kernels, quantization, parts=adapters is None)
    if quantization and not packed:
        name = type(paged.transformer).__name__
        raise UnsupportedModel(
            f"{name} cannot be quantised: it reads its weights for itself", "quantization"
        )
    widen(paged.transformer)
    return paged


def _require_rounding(args: EngineArgs, model: PreTrainedModel) -> None:
    """Refuses ``activations`` "int8" where no layer rounds its rows."""
    if args.activations == "int8" and not rounds_rows(model):
        raise InvalidConfig(
            "activations 'int8' is for 4-bit weights of a quantized checkpoint on the compiled CPU "
            f"kernels, and {args.model} has no such layer; plain weights: quantization 'int4'",
            "activations",
        )


def _require_quantisable(args: EngineArgs, device: torch.device, ranks: int = 1) -> None:
    """Refuses quantization where its kernels do not run; says why."""
    why = None
    if ranks > 1:
        why = "is for one device, not for several that share a model"
    elif device.type != "cpu":
        why = f"is for a CPU, and the device is {device.type!r}"
    elif args.attention not in ("auto", "cpu"):
        why = f"runs on the compiled CPU kernels, not with attention {args.attention!r}"
    elif args.dtype == "float16":
        why = "wants dtype float32 or bfloat16, not 'float16'"
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

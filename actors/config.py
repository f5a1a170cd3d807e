"""What a user sets, and what an engine runs with.

``EngineArgs`` has one field per flag, None where Rayfin decides. ``resolve`` combines it with facts
of the loaded model into a frozen ``EngineConfig``. Nothing is written back, and no other function
decides a default.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from rayfin.actors.code_version import code_version, grammar_version
from rayfin.actors.errors import InvalidConfig, NoRoomNow
from rayfin.actors.parts import PartFacts, front_tokens, uncut_of
from rayfin.actors.plugins import check_plugins
from rayfin.actors.settings.bidirectional import ANY, Bidirectional
from rayfin.actors.settings.choices import (
    CHOICES,
    OPTIONAL_CHOICES,
    Activations,
    BatchMode,
    Convert,
    Device,
    Dtype,
    KVCacheDtype,
    LoadFormat,
    LogFormat,
    LogLevel,
    LogprobsMode,
    LoraDtype,
    Policy,
    Preemption,
    Quantization,
    Runner,
    SchedulerName,
    Switch,
)
from rayfin.actors.settings.kv_disk import page_folder, require_disk, resolve_host_pages
from rayfin.actors.settings.kv_events import read_kv_events
from rayfin.actors.settings.kv_offloading import offloaded_pages, require_offloading
from rayfin.actors.settings.kv_transfer import read_kv_transfer
from rayfin.actors.settings.lora_limits import require_one_device
from rayfin.actors.settings.spare_runners import require_spares
from rayfin.actors.settings.state_snapshots import draft_states, resolve_snapshots
from rayfin.actors.speculation import SpeculativeConfig, chosen_speculation, read_speculation
from rayfin.cache.page_files import PageFolder
from rayfin.cache.window_tables import WindowGroups

DECIDE_TOKENS = (
    *("model", "tokenizer", "revision", "dtype", "quantization", "activations"),
    *("kv_cache_dtype", "load_format", "seed", "hf_overrides", "tokenizer_revision"),
    *("runner", "convert", "pooler_config", "lora_dtype"),
    *("language_model_only", "mm_processor_kwargs", "plugin"),
)
"""The settings that decide which tokens are sampled; the others decide when."""

WEIGHTS_CACHE, DEFAULT_WEIGHTS_CACHE = "RAYFIN_WEIGHTS_CACHE", "~/.cache/rayfin/weights"
"""The variable of the environment that names a folder of packed weights, and the default one."""

DEFAULT_BATCH_TOKENS = {"cpu": 256, "cuda": 8192}
DEFAULT_DECODING_BATCH = {"cpu": 64, "cuda": 256}
PREFILL_BATCH = 16  # prompts in a step, on a CPU and of models with states
DEFAULT_MEMORY_UTILIZATION = {"cpu": 0.4, "cuda": 0.9}  # a CPU's memory is everything else's too

POSITIVE = (  # or None
    *("max_model_len", "max_batch_tokens", "max_decoding_batch"),
    *("page_size", "kv_cache_memory", "num_pages", "max_waiting_requests", "max_waiting_tokens"),
    *("max_loras", "max_cpu_loras", "max_lora_rank"),
    *("max_lease", "threads", "tensor_parallel_size", "pipeline_parallel_size"),
)


def _require(condition: bool, name: str, rule: str) -> None:
    if not condition:
        raise InvalidConfig(f"{name} {rule}", name)


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


PlaceStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
PLACE = "placement"


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What each worker of an engine asks of its node, and how stages lie."""

    cpus: float = 1.0
    gpus: float = 1.0  # on a GPU: a share of it, or whole ones
    strategy: PlaceStrategy = "PACK"  # of the stages; the ranks of a stage share a node
    resources: Mapping[str, float] = field(default_factory=dict)  # Ray's, by name


def read_place(given: Mapping[str, Any] | None) -> WorkerPlace:
    """Reads the setting; None is as usual: a core, or a core and a GPU.

    Raises:
        InvalidConfig: a field or value that is none.
    """
    if given is None:
        return WorkerPlace()
    known = [setting.name for setting in fields(WorkerPlace)]
    if not isinstance(given, Mapping) or given.keys() - set(known):
        raise InvalidConfig(f"{PLACE} is an object of {', '.join(known)}; got {given!r}", PLACE)
    place = WorkerPlace(**given)
    if place.strategy not in get_args(PlaceStrategy):
        raise InvalidConfig(f"{PLACE}: strategy must be one of {get_args(PlaceStrategy)}", PLACE)
    amounts = {"cpus": place.cpus, "gpus": place.gpus}
    if not isinstance(place.resources, Mapping):
        raise InvalidConfig(f"{PLACE}: resources must be an object", PLACE)
    for name, amount in (amounts | dict(place.resources)).items():
        if not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise InvalidConfig(f"{PLACE}: {name} must be at least 0, got {amount!r}", PLACE)
    if place.gpus > 1 and place.gpus % 1:
        raise InvalidConfig(f"{PLACE}: gpus is a share of one, or whole ones", PLACE)
    if not place.gpus or not (place.cpus or place.resources or "gpus" in given):
        raise InvalidConfig(f"{PLACE}: a worker needs some of its device", PLACE)
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """One engine's settings, under the names of the CLI, ``LLM`` and Serve."""

    model: str = _flag(
        "demo",
        "local folder, GGUF file, Hugging Face name, address of a bucket (s3://, gs://, ...), or "
        "'demo' (the built-in toy model)",
    )
    tokenizer: str | None = _flag(
        None, "folder or Hugging Face name of the tokenizer; default: the model's"
    )
    revision: str | None = _flag(None, "branch, tag or commit on Hugging Face")
    tokenizer_revision: str | None = _flag(
        None, "branch, tag or commit of the tokenizer; default: --revision"
    )
    download_dir: str | None = _flag(None, "folder for downloads; default: Hugging Face's cache")
    hf_overrides: dict[str, Any] | None = _flag(None, "JSON object of changes to config.json")
    trust_remote_code: bool = _flag(False, "allow Python code from the model repository")
    runner: Runner = _flag(
        "auto", "generate text, or pooling: embeddings, scores, classes; auto: as the folder says"
    )
    convert: Convert = _flag(
        "auto",
        "serve a generative model as another kind: embed or classify; none or auto: as it is",
    )
    pooler_config: dict[str, Any] | None = _flag(
        None, "JSON object: pooling_type CLS, LAST or MEAN, use_activation, dimensions"
    )
    dtype: Dtype = _flag(
        "auto",
        "dtype of weights and activations; auto: float32 on a CPU, the model's dtype on a GPU",
    )
    quantization: Quantization | None = _flag(
        None,
        "int8: weights of linear layers in 8 bits, and activations on a CPU; int4: weights in 4 "
        "bits; dequantize: plain weights of a quantized checkpoint; default: as the checkpoint",
    )
    activations: Activations = _flag(
        "exact",
        "what the rows of products are rounded to; on a CPU int8: of those with a checkpoint's "
        "integers; bfloat16: of those with 16-bit weights, as vLLM and transformers do; on a GPU "
        "fp8: of those with a checkpoint's fp8, in steps of many rows",
    )
    load_format: LoadFormat = _flag("auto", "auto: safetensors; dummy: random weights")
    weights_cache: str | None = _flag(
        None,
        "folder of packed weights, on a CPU: starts that find theirs map them; off: none; default: "
        "RAYFIN_WEIGHTS_CACHE in the environment, or ~/.cache/rayfin/weights for models of at most "
        "4 GiB",
    )
    weights_cache_gb: float = _flag(64.0, "most that folder holds, GiB; what is unused goes first")
    weight_dir: str | None = _flag(
        None,
        "folder of each node for new weights of a running model (docs/rollouts.md); default: the "
        "node's shared memory",
    )
    spare_runners: int | None = _flag(
        None,
        "processes that wait with all imports done, to take over from a runner that dies, on a CPU "
        "with one rank; 0: none; default: 1 for a server where memory allows",
    )
    device: Device = _flag("auto", "auto uses a GPU if there is one")
    placement: dict[str, Any] | None = _flag(
        None,
        "JSON object of each worker's place on a cluster: cpus, gpus (1 each), resources of Ray by "
        'name, such as {"accelerator_type:L4": 0.001}, and strategy, PACK or SPREAD, of stages',
    )
    seed: int = _flag(0, "random seed of dummy weights")
    max_model_len: int | None = _flag(
        None, "maximum length of prompt and output in tokens; default: the model's"
    )
    max_batch_tokens: int | None = _flag(
        None, "maximum number of tokens in one step; default: 256 on a CPU, 8192 on a GPU"
    )
    max_decoding_batch: int | None = _flag(
        None, "maximum number of running requests; default: 64 on a CPU, 256 on a GPU"
    )
    page_size: int = _flag(16, "tokens in a page of the KV cache")
    kv_cache_dtype: KVCacheDtype = _flag(
        "auto", "dtype of the KV cache; auto: --dtype; fp8 needs a GPU"
    )
    check_pages: bool = _flag(
        False,
        "verify a checksum of each full page before it is shared, and replace the runner if "
        "it differs",
    )
    prefix_caching: bool = _flag(True, "share the pages of common prompt prefixes")
    disable_hybrid_kv_cache_manager: bool = _flag(
        False,
        "keep the pages of all layers as long as a request runs, also of layers whose tokens see "
        "only a window",
    )
    memory_utilization: float | None = _flag(
        None,
        "share of the device's memory for weights, activations and the KV cache, between 0 and 1; "
        "default: 0.4 on a CPU, 0.9 on a GPU",
    )
    kv_cache_memory: int | None = _flag(
        None, "bytes of the KV cache; default: what --memory-utilization leaves"
    )
    num_pages: int | None = _flag(None, "pages of the KV cache; default: as many as fit")
    scheduler: SchedulerName = _flag(
        "v1", "v1: token-level with chunked prefill; v0: whole prompts"
    )
    policy: Policy = _flag(
        "fcfs",
        "which request is next: the earliest, the one with the lowest priority value, or "
        "one of the tenant served least",
    )
    batch_mode: BatchMode = _flag("idle", "whether batches rest while other requests run")
    sessions: Switch = _flag(
        "on",
        "under pressure, some sessions (X-Session-Id) wait whole and the others keep their pages "
        "over their pauses",
    )
    priority_aging: float = _flag(
        30.0, "seconds of waiting that count as one level of priority; 0 for strict levels"
    )
    tenant_weights: str | None = _flag(
        None, "shares of tenants under --policy fair, such as 'gold=4,free=1'; default: 1 each"
    )
    preemption: Preemption | None = _flag(
        None,
        "when the KV cache is full: recompute (default for v1) or swap to host memory (for v0)",
    )
    swap_space: float = _flag(4.0, "host memory for swapped requests in GiB")
    kv_offloading_size: float | None = _flag(
        None,
        "host memory for pages that a GPU's prefix cache evicts, GiB, of all ranks together; "
        "default: none",
    )
    kv_disk_path: str | None = _flag(
        None,
        "folder for pages of requests that have ended: later prompts, also after a restart, "
        "read their common prefix there; default: none",
    )
    kv_disk_size: float = _flag(16.0, "most that folder holds, GiB; what is unused goes first")
    kv_events_config: dict[str, Any] | None = _flag(
        None,
        "tell readers which pages the engine has, as JSON with vLLM's keys, such as "
        "'{\"enable_kv_cache_events\": true}'; needs the extra events",
    )
    kv_transfer_config: dict[str, Any] | None = _flag(
        None,
        "vLLM's connectors as JSON: their tiers become --kv-offloading-size, --kv-disk-path and "
        "--kv-port, any other connector --kv-peers; default: none",
    )
    kv_peers: bool = _flag(
        True, "read pages of a prompt from another engine of the model that has computed them"
    )
    kv_port: int = _flag(
        0, "TCP port where runners of other machines read pages: of rank 0, N + r of rank r; 0: any"
    )
    long_prefill_token_threshold: int = _flag(0, "most tokens of a prompt in a step; 0: no limit")
    itl_target_ms: float | None = _flag(
        None,
        "milliseconds between two tokens of a stream that a step may take: prompts beside streams "
        "get as many tokens as fit; default: what --max-batch-tokens leaves",
    )
    max_waiting_requests: int = _flag(4096, "maximum number of waiting requests; more get a 429")
    max_waiting_tokens: int | None = _flag(
        None,
        "maximum number of waiting prompt tokens, over which requests get a 429; one prompt "
        "may always wait",
    )
    steps_in_flight: int = _flag(
        2, "2: one more step in flight than pipeline stages; 1: no step ahead"
    )
    max_lease: int = _flag(16, "maximum number of decode steps in one call to the runner")
    speculative_config: str | None = _flag(
        None,
        'speculative decoding, as JSON with vLLM\'s keys, such as \'{"method": "suffix"}\'; '
        "changes no token; default: ngram for a decoder on one CPU device, else none",
    )
    spec_method: str | None = _flag(
        None,
        "its method alone: ngram (the request's own text), suffix (earlier requests' too), "
        "draft_model, or a head: eagle, eagle3, mtp; none: no speculation",
    )
    spec_model: str | None = _flag(
        None, "its draft model or head alone: local folder or Hugging Face name"
    )
    spec_tokens: int | None = _flag(
        None,
        "its most drafted tokens of a request in a step; default: 5 on a CPU, 7 on a GPU, 16 for "
        "suffix",
    )
    tensor_parallel_size: int = _flag(1, "number of devices of one node that share each layer")
    pipeline_parallel_size: int = _flag(1, "number of pipeline stages, each with its own devices")
    enable_lora: bool = _flag(
        False, "serve LoRA adapters; on if another flag about adapters is given"
    )
    max_loras: int | None = _flag(
        None, "maximum number of adapters in one step; default: 32 on a CPU, 8 on a GPU"
    )
    max_cpu_loras: int | None = _flag(
        None, "adapters that an engine keeps in memory; default: four times --max-loras"
    )
    max_lora_rank: int = _flag(64, "maximum rank of an adapter")
    lora_dtype: LoraDtype = _flag("auto", "dtype of adapters; auto: --dtype")
    threads: int | None = _flag(
        None, "CPU threads for computation; default: all cores, 1 for a tiny model"
    )
    max_logprobs: int = _flag(
        20, "maximum number of log probabilities per token in a request; -1 for no limit"
    )
    logprobs_mode: LogprobsMode = _flag(
        "raw_logprobs",
        "log probabilities of requests that name no logprobs_mode: the model's own (raw_logprobs), "
        "or those that tokens are drawn by (processed_logprobs)",
    )
    log_format: LogFormat = _flag("text", "text or JSON lines")
    log_level: LogLevel = _flag("info", "minimum level of log messages")
    attention: str = _flag("auto", "attention backend: auto, cpu, triton, fa3, torch or reference")
    enforce_eager: bool = _flag(False, "disable CUDA graphs")
    language_model_only: bool = _flag(False, "serve a model of images or audio for text only")
    mm_processor_kwargs: dict[str, Any] | None = _flag(
        None, "settings of the image or audio processor, JSON"
    )
    enable_prompt_embeds: bool = _flag(False, "take embeddings in prompts: prompt_embeds")
    profile_dir: str | None = _flag(
        None, "folder of each node for profiles by /start_profile, as Chrome traces; default: none"
    )
    plugin: list[str] | None = _flag(
        None,
        "code of your own as KIND=module:name; may be repeated; KIND is setup, logits_processor, "
        "proposer, observer, gate, route, format or stat_logger (docs/contributing.md)",
    )
    mm_encoder_cache_gb: float = _flag(1.0, "memory for the embeddings of media seen last, GiB")

    def __post_init__(self) -> None:
        for name, value in read_kv_transfer(self.kv_transfer_config).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "kv_transfer_config", None)
        for name, literal in CHOICES.items():
            value = getattr(self, name)
            if not (value in get_args(literal) or (value is None and name in OPTIONAL_CHOICES)):
                raise InvalidConfig(
                    f"{name} must be one of {get_args(literal)}, got {value!r}", name
                )
        for name in POSITIVE:
            value = getattr(self, name)
            _require(value is None or value >= 1, name, f"must be at least 1, got {value}")
        for name in ("hf_overrides", "mm_processor_kwargs"):
            if not isinstance(getattr(self, name), dict | None):
                raise InvalidConfig(f"{name} must be an object", name)
        read_place(self.placement)
        check_plugins(self.plugin)
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        share, space, aging = self.memory_utilization, self.swap_space, self.priority_aging
        chunk, steps = self.long_prefill_token_threshold, self.steps_in_flight
        gap = self.itl_target_ms
        logprobs = self.max_logprobs
        in_range = share is None or 0 < share <= 1
        _require(in_range, "memory_utilization", f"must be in (0, 1], got {share}")
        _require(0 <= space < math.inf, "swap_space", f"must be at least 0 GiB, got {space}")
        cache = self.mm_encoder_cache_gb
        _require(0 <= cache < math.inf, "mm_encoder_cache_gb", f"must be at least 0, got {cache}")
        _require(0 <= aging < math.inf, "priority_aging", f"must be at least 0 s, got {aging}")
        size = self.weights_cache_gb
        _require(0 < size < math.inf, "weights_cache_gb", f"must be over 0, got {size}")
        in_range = gap is None or 0 < gap < math.inf
        _require(in_range, "itl_target_ms", f"must be over 0 ms, got {gap}")
        port = self.kv_port
        _require(0 <= port <= 65535, "kv_port", f"must be in [0, 65535], got {port}")
        _require(chunk >= 0, "long_prefill_token_threshold", f"must be at least 0, got {chunk}")
        _require(steps in (1, 2), "steps_in_flight", f"must be 1 or 2, got {steps}")
        _require(logprobs >= -1, "max_logprobs", f"must be at least 0, or -1, got {logprobs}")

    def _check_combinations(self) -> None:
        tokens, decoding = self.max_batch_tokens, self.max_decoding_batch
        if tokens is not None and decoding is not None and decoding > tokens:
            raise InvalidConfig(
                f"max_decoding_batch ({decoding}) is over max_batch_tokens ({tokens}): "
                "each running request takes a token of every step",
                "max_decoding_batch",
            )
        _require(
            not (self.long_prefill_token_threshold and self.scheduler == "v0"),
            "long_prefill_token_threshold",
            "splits prompts, which scheduler v0 never does",
        )
        _require(
            self.itl_target_ms is None or self.scheduler == "v1",
            "itl_target_ms",
            f"splits prompts, which scheduler {self.scheduler!r} never does",
        )
        require_disk(self)
        require_offloading(self)
        read_kv_events(self.kv_events_config)
        require_one_device(self)
        require_spares(self)
        speculation = self.speculation
        _require(
            speculation is None or self.pipeline_parallel_size == 1,
            "speculative_config",
            "cannot be combined with pipeline_parallel_size over 1",
        )
        _require(
            speculation is None or not speculation.one_device or self.tensor_parallel_size == 1,
            "speculative_config",
            "with a draft model or a head cannot be combined with tensor_parallel_size over 1",
        )
        _require(
            speculation is None or self.scheduler == "v1",
            "speculative_config",
            f"needs scheduler 'v1', not {self.scheduler!r}",
        )
        _require(
            not parse_weights(self.tenant_weights) or self.policy == "fair",
            "tenant_weights",
            f"has no meaning under policy {self.policy!r}: it needs 'fair'",
        )

    @property
    def weights_folder(self) -> Path | None:
        """Returns the folder of packed weights, or None if none are kept."""
        given = self.weights_cache or os.environ.get(WEIGHTS_CACHE) or DEFAULT_WEIGHTS_CACHE
        return None if given == "off" else Path(given).expanduser()

    @property
    def names_weights_folder(self) -> bool:
        """Says whether that folder is not the default one."""
        return bool(self.weights_cache or os.environ.get(WEIGHTS_CACHE))

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may name an adapter."""
        return self.enable_lora or self.max_loras is not None or self.max_cpu_loras is not None

    @property
    def hub(self) -> dict[str, Any]:
        """Keyword arguments of ``from_pretrained``: where on the Hub, or in its cache, to look."""
        return {"revision": self.revision, "cache_dir": self.download_dir}

    @property
    def tokenizer_hub(self) -> dict[str, Any]:
        """The same for the tokenizer."""
        return self.hub | {"revision": self.tokenizer_revision or self.revision}

    @property
    def sets_speculation(self) -> bool:
        """Whether a setting says who drafts, or that nothing does."""
        named = (self.speculative_config, self.spec_method, self.spec_model)
        return any(setting is not None for setting in named)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Who drafts tokens by these settings, or None; ``resolve`` may choose a method itself."""
        return read_speculation(
            self.speculative_config, self.spec_method, self.spec_model, self.spec_tokens
        )

    @property
    def draft_model(self) -> "EngineArgs | None":
        """The settings of the model that drafts, or None."""
        speculation = self.speculation
        if speculation is None or speculation.method != "draft_model":
            return None
        of_target = ("tokenizer", "revision", "tokenizer_revision", "hf_overrides", "max_model_len")
        drafting = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
        plain: dict[str, Any] = {"runner": "generate", "convert": "none", "enable_lora": False}
        plain |= dict.fromkeys((*of_target, *drafting, "max_loras", "max_cpu_loras"))
        return replace(self, model=str(speculation.model), **plain)

    @property
    def place(self) -> WorkerPlace:
        """What each worker asks of its node."""
        return read_place(self.placement)

    @property
    def identity(self) -> str:
        """What decides the tokens, and the version of the code, as text.

        An ingress connects to engines of its own identity only: a stream continues with the same
        tokens, and both ends of a connection run the same code. The library that makes the masks of
        grammars decides tokens too. The content of a model folder is not part of it: new weights
        need a new folder or revision.
        """
        settings = [field for field in fields(self) if field.name in DECIDE_TOKENS]
        values = [(field.name, getattr(self, field.name), field.default) for field in settings]
        changed = [
            f"{name}={value}"
            for name, value, default in values
            if name == "model" or value != default
        ]
        return " ".join([f"code={code_version()}", f"llguidance={grammar_version()}", *changed])

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EngineArgs":
        """Builds from keyword names.

        Raises:
            InvalidConfig: an unknown name, or a value out of range.
        """
        names = {f.name for f in fields(cls)}
        for name in values:
            if name not in names:
                near = get_close_matches(name, names, 3) or sorted(names)
                word = "near" if len(near) < len(names) else "known"
                raise InvalidConfig(f"unknown setting {name!r}; {word}: {', '.join(near)}", name)
        config = values.get("speculative_config")
        if isinstance(config, Mapping):
            values = {**values, "speculative_config": json.dumps(dict(config))}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a loaded model and its device, which the runner measures for ``resolve``."""

    architecture: str
    vocab_size: int
    max_position: int | None  # None: no limit
    page_bytes: int  # of one page of all layers, keys and values
    available_bytes: int  # memory left for pages, by a profiling run
    share_bytes: int = 0  # of which it is left: those of memory_utilization; 0: none was measured
    state_bytes: int = 0  # of recurrent layers, per request
    fixed_bits: bool = True  # logits do not depend on the other rows of a step
    pools: bool = False  # it answers with vectors or scores
    device: str = "cpu"  # "cpu" or "cuda"
    whole_prompts: bool = False  # an encoder: it computes prompts whole and keeps nothing
    smaller_pages: tuple[tuple[str, int], ...] = ()  # kv_cache_dtype and bytes of a page
    int4_saves: int = 0  # bytes of weights that quantization "int4" would free
    parts: tuple[PartFacts, ...] = ()  # what the model has beside its decoder
    page_namespace: str = ""  # with kv_disk_path, where pages are all that a prefix leaves
    windows: WindowGroups | None = None  # groups of layers whose pages are freed behind windows

    @property
    def front_tokens(self) -> int:
        """Tokens in front of each prompt, which do not count in max_model_len."""
        return front_tokens(self.parts)

    @property
    def uncut(self) -> Bidirectional:
        """Parts of prompts that no step cuts."""
        return uncut_of(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of one step; known before the model is loaded, since profiling runs such a step."""

    max_batch_tokens: int
    max_decoding_batch: int
    max_prefill_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings that an engine runs with; only ``resolve`` creates them."""

    limits: BatchLimits
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    scheduler: SchedulerName
    policy: Policy
    max_waiting_requests: int
    steps_in_flight: int
    max_waiting_tokens: int | None = None
    priority_aging: float = 0.0
    batch_mode: BatchMode = "idle"
    sessions: bool = True  # under pressure some keep their pages and others wait
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    long_prefill_token_threshold: int = 0
    itl_target: float | None = None  # seconds that a step with prompts and streams may take
    prefix_caching: bool = True
    max_lease: int = 1
    max_logprobs: int = 20  # -1: as many as the vocabulary has tokens
    logprobs_mode: LogprobsMode = "raw_logprobs"
    num_host_pages: int = 0  # of swap space; 0: preempted requests are recomputed
    num_offloaded_pages: int = 0  # further ones, for pages that leave the prefix cache
    num_speculative_tokens: int = 0  # most drafts of a decoding row in a step
    recurrent: bool = False  # layers keep a state by slot, which belongs to num_computed
    num_snapshots: int = 0  # of such states, which prefix hits start from
    state_bytes: int = 0  # of one of them
    num_draft_states: int = 0  # of such states, behind drafts of a step
    speculation: SpeculativeConfig | None = None  # None: a proposer from outside, or none
    whole_prompts: bool = False  # a step computes prompts whole; pages are names without memory
    plugins: tuple[str, ...] = ()  # code of a user's own, by name
    send_history: bool = False  # runners get the tokens of every request, for a proposer, say
    parts: tuple[PartFacts, ...] = ()  # what the model has beside its decoder
    uncut: Bidirectional = Bidirectional()  # parts of prompts that no step cuts
    page_bytes: int = 0  # of all layers
    memory_bytes: int = 0  # that a runner takes at most, with its pages; 0: not measured
    kv_cache_dtype: str = "auto"  # this and the next: what the cache was made from, for metrics
    memory_utilization: float | None = None
    kv_cache_memory: int | None = None  # bytes
    num_pages_asked: int | None = None
    page_folder: PageFolder | None = None  # files of pages that outlive the runners
    kv_peers: bool = False  # engines of the model read each other's pages
    windows: WindowGroups | None = None  # groups of layers whose pages are freed behind windows

    @property
    def max_pages_per_request(self) -> int:
        """Entries of the longest table."""
        return -(-self.max_model_len // self.page_size)

    def pages_of(self, entries: int) -> int:
        """Pages that a table of so many entries takes at most at one time."""
        return entries if self.windows is None else self.windows.pages(entries)

    @property
    def capacity(self) -> int:
        """Tokens that the pages hold, of requests at their full length."""
        if self.windows is None:
            return self.num_pages * self.page_size
        longest = self.max_pages_per_request
        return self.num_pages * longest * self.page_size // self.windows.pages(longest)


def resolve_limits(
    args: EngineArgs,
    device: str,
    model_len: int,
    uncut: Bidirectional = ANY,
    *,
    whole_prompts: bool = False,
    row_by_row: bool = False,
) -> BatchLimits:
    """Returns the limits of a step on ``device`` ("cpu", "cuda"), for ``model_len`` tokens.

    Args:
        uncut: what a step has to hold whole; InvalidConfig if ``max_batch_tokens`` does not.
        whole_prompts: of an encoder, whose steps have whole prompts only, as many as there are.
        row_by_row: of a model with states, whose layers compute one prompt after the other.
    """
    decoding = args.max_decoding_batch or DEFAULT_DECODING_BATCH[device]
    tokens = uncut.batch_tokens(args.max_batch_tokens, DEFAULT_BATCH_TOKENS[device], decoding)
    if args.max_decoding_batch is None:
        decoding = min(decoding, tokens)
    # A GPU takes prompts kernel by kernel from the host, which costs as much for one as for many.
    few = (device == "cpu" or row_by_row) and not whole_prompts
    prompts = PREFILL_BATCH if few else decoding
    if args.scheduler == "v0" or whole_prompts:
        tokens = max(tokens, model_len)  # a prompt is never split
    return BatchLimits(
        max_batch_tokens=tokens, max_decoding_batch=decoding, max_prefill_batch=prompts
    )


def resolve_model_len(args: EngineArgs, max_position: int | None, front_tokens: int = 0) -> int:
    """Returns the tokens of the longest request, checked against the model's positions.

    Those in front of each prompt (a clip) do not count in ``max_model_len``, as in vLLM.
    """
    if args.max_model_len is None:
        return max_position or 32_768
    given = args.max_model_len + front_tokens
    if max_position is not None and given > max_position:
        raise InvalidConfig(
            f"max_model_len ({args.max_model_len}) is over the model's own limit "
            f"({max_position - front_tokens})",
            "max_model_len",
        )
    return given


def scarcest(facts: Sequence[ModelFacts]) -> ModelFacts:
    """Returns the facts of the rank with room for the fewest pages; the first one names them."""
    fewest = min(facts, key=lambda rank: rank.available_bytes // max(rank.page_bytes, 1))
    return replace(fewest, page_namespace=facts[0].page_namespace)


def resolve(args: EngineArgs, facts: ModelFacts, limits: BatchLimits) -> EngineConfig:
    """Decides the number of pages and the longest request.

    pages = available bytes / page bytes, limited to what all slots can fill, as is swap space.

    Raises:
        InvalidConfig: one request of ``max_model_len`` does not fit.
    """
    model_len = resolve_model_len(args, facts.max_position, facts.front_tokens)
    available = args.kv_cache_memory or facts.available_bytes
    snapshots, speculation = resolve_snapshots(args, facts, limits), chosen_speculation(args, facts)
    if args.kv_cache_memory is None:
        available -= snapshots * facts.state_bytes
    windows, per_request, max_pages = _most_pages(args, facts, limits, model_len)
    # A model without attention fills no pages, nor does an encoder: slots are the only limit.
    pages = args.num_pages or (available // facts.page_bytes if facts.page_bytes else max_pages)
    recurrent, whole = facts.state_bytes > 0, facts.whole_prompts
    if (pages := max_pages if whole else min(pages, max_pages)) < per_request:
        if args.max_model_len is not None or pages * args.page_size <= facts.front_tokens:
            raise too_long(args, facts, model_len, available, windows)
        model_len = min(_longest(pages, windows) * args.page_size, model_len)
    beside = facts.share_bytes - facts.available_bytes + snapshots * facts.state_bytes
    alone = whole or facts.uncut.ahead == "prompt"  # a page depends on the tokens behind it
    shares = args.prefix_caching and (snapshots > 0 or not recurrent) and not alone
    return EngineConfig(
        limits=limits,
        max_model_len=model_len,
        vocab_size=facts.vocab_size,
        page_size=args.page_size,
        num_pages=pages,
        page_bytes=facts.page_bytes,
        memory_bytes=beside + pages * facts.page_bytes if facts.share_bytes else 0,
        scheduler=args.scheduler,
        policy=args.policy,
        priority_aging=args.priority_aging,
        batch_mode=args.batch_mode,
        sessions=args.sessions == "on" and windows is None,
        tenant_weights=parse_weights(args.tenant_weights),
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        itl_target=None if args.itl_target_ms is None else args.itl_target_ms / 1000,
        max_waiting_requests=args.max_waiting_requests,
        max_waiting_tokens=args.max_waiting_tokens,
        steps_in_flight=1 if args.steps_in_flight == 1 else args.pipeline_parallel_size + 1,
        prefix_caching=shares,
        page_folder=page_folder(args, facts, shares=shares),
        kv_peers=args.kv_peers and shares and facts.page_bytes > 0 and windows is None,
        whole_prompts=whole,
        num_snapshots=snapshots,
        state_bytes=facts.state_bytes,
        num_draft_states=draft_states(args, limits, facts.device) if recurrent else 0,
        recurrent=recurrent,
        max_lease=args.max_lease,
        max_logprobs=args.max_logprobs,
        logprobs_mode=args.logprobs_mode,
        num_host_pages=resolve_host_pages(args, facts, max_pages),
        num_offloaded_pages=offloaded_pages(args, facts, shares=shares),
        kv_cache_dtype=args.kv_cache_dtype,
        memory_utilization=args.memory_utilization,
        kv_cache_memory=args.kv_cache_memory,
        num_pages_asked=args.num_pages,
        num_speculative_tokens=speculation.most_tokens(facts.device) if speculation else 0,
        speculation=speculation,
        plugins=tuple(args.plugin or ()),
        parts=facts.parts,
        windows=windows,
        uncut=replace(facts.uncut, room=limits.max_batch_tokens - limits.max_decoding_batch),
    )


def _most_pages(
    args: EngineArgs, facts: ModelFacts, limits: BatchLimits, model_len: int
) -> tuple[WindowGroups | None, int, int]:
    """Returns the groups of layers, the longest request's pages, and those of all slots."""
    entries = -(-model_len // args.page_size)
    if facts.windows is None:
        return None, entries, entries * limits.max_decoding_batch
    speculation = chosen_speculation(args, facts)
    drafts = speculation.most_tokens(facts.device) if speculation else 0
    # Tokens that are not known yet count as a chunk does.
    ahead = (args.pipeline_parallel_size + 1) * args.max_lease * (1 + drafts)
    tokens = max(limits.max_batch_tokens, ahead) + args.page_size
    windows = facts.windows.with_reach(tokens, args.page_size)
    every = entries * limits.max_decoding_batch * windows.pages_per_entry
    return windows, windows.pages(entries), every


def _longest(pages: int, windows: WindowGroups | None) -> int:
    """Entries of the longest request that fits into ``pages``."""
    entries = None if windows is None else windows.most_entries(pages)
    return pages if entries is None else entries


def parse_weights(text: str | None) -> dict[str, float]:
    """``tenant_weights`` as shares by tenant: 'gold=4,free=1' is {"gold": 4.0, "free": 1.0}.

    Raises:
        InvalidConfig: not pairs of a name and a number over 0, or a name twice.
    """
    weights: dict[str, float] = {}
    for part in text.split(",") if text else []:
        name, equals, value = (piece.strip() for piece in part.rpartition("="))
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not equals or not name or not 0 < weight < math.inf:
            raise InvalidConfig(
                f"tenant_weights must be like 'gold=4,free=1' with numbers over 0, got {part!r}",
                "tenant_weights",
            )
        if name in weights:
            raise InvalidConfig(f"tenant_weights names {name!r} twice", "tenant_weights")
        weights[name] = weight
    return weights


def too_long(
    args: EngineArgs,
    facts: ModelFacts,
    wanted: int,
    available: int,
    windows: WindowGroups | None = None,
) -> InvalidConfig:
    """Names what would fit: settings with the longest request that each makes room for.

    Args:
        wanted: tokens of the longest request.
        available: bytes for pages.

    Returns:
        A NoRoomNow where ``available`` was measured, and not set by ``args``.
    """
    size, page, saved = args.page_size, facts.page_bytes, facts.int4_saves
    needed = -(-wanted // size)
    if windows is not None:
        needed = windows.pages(needed)
    pages = max(args.num_pages or available // page, 0)
    ways = [("max_model_len {}", _longest(pages, windows) * size)]
    for name, smaller in facts.smaller_pages if args.num_pages is None else ():
        ways.append((f"kv_cache_dtype {name!r} for {{}}", available // smaller * size))
    if args.num_pages is None and args.kv_cache_memory is None and saved:
        longest = (available + saved) // page * size
        ways.append((f"quantization 'int4' ({saved:,} bytes less) for {{}}", longest))
    for part in facts.parts if args.num_pages is None and args.kv_cache_memory is None else ():
        if part.smaller is not None:
            settings, saved = part.smaller
            longest = (available + saved) // page * size
            ways.append((f"{settings} ({saved:,} bytes less) for {{}}", longest))
    more = f"memory_utilization for {needed * page - available:,} bytes more"
    fixed = args.num_pages or args.kv_cache_memory
    if fixed:
        more = f"num_pages {needed}" if args.num_pages else f"kv_cache_memory {needed * page}"
    front = facts.front_tokens  # do not count in max_model_len
    fits = [way.format(min(longest, wanted) - front) for way, longest in ways if longest > front]
    return (InvalidConfig if fixed else NoRoomNow)(
        f"a request of {wanted} tokens needs {needed} pages ({needed * page:,} bytes), {pages} "
        f"fit. What fits: {'; '.join([*fits, more])}",
        "max_model_len",
    )

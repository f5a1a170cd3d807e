"""Every metric of Rayfin once: name, help, labels, buckets, and its name in vLLM.

Actors count in plain fields (``EngineStats``, ``IngressCounters``); the hub (``hub.py``) gathers
and renders. Label sets are closed: model name and engine are the operator's, all other values are
the words below. No request can create a new series.

Names and buckets of the alias are vLLM's (``vllm/v1/metrics/loggers.py``); our buckets include
theirs, and finer ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from rayfin.actors.adapters.usage import LOAD_RESULTS
from rayfin.actors.histogram import Bounds
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.speculation import MOST_TOKENS

PREFIX = "rayfin_"
ALIAS_PREFIX = "vllm:"
EVERY_ENGINE = "all"
"""Under the alias every series has the label ``engine``; this is its value for other metrics."""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REPLAY_REASONS = ("lost", "moved")
WAITING_REASONS = ("capacity", "deferred")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
PAGE_STATES = ("held", "cached", "free")
TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
REJECTIONS = ("queue_full", "draining", "quarantined", "invalid")
FAILURES = (
    *("engine_error", "numerical_error", "request_quarantined", "deadline_exceeded"),
    *("engine_unavailable", "grammar_failed", "grammar_too_slow", "no_token_left", "other"),
)
DRAFT_POSITIONS = tuple(str(place) for place in range(MOST_TOKENS))
GRAMMAR_FAILURES = ("compile", "failed", "too_slow")
IMAGE_REFUSALS = (
    *("invalid_image", "invalid_audio", "media_url_refused", "media_unavailable"),
    *("too_many_images", "too_many_audios", "unsupported_content", "other"),
)
GUIDED_KINDS = (*("json", "json_object", "regex", "choice", "grammar", "structural_tag", "tools"),)
VERDICTS = ("ok", "invalid", "unsupported", "too_complex")
TOOL_CHOICES = ("auto", "required", "named")
HANDLERS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v2/embed", "/score", "/v1/score", "/classify", "/pooling"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/audio/transcriptions"),
    *("/v1/audio/translations", "/invocations", "other"),
)
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
BATCH_LINES = ("ok", "error", "expired")
STATUSES = ("2xx", "3xx", "4xx", "5xx", "none")

TTFT_BOUNDS: Bounds = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
VLLM_ITL_BOUNDS: Bounds = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ITL_BOUNDS: Bounds = (0.0001, 0.0005, 0.001, 0.0025, 0.005, *VLLM_ITL_BOUNDS)
VLLM_LATENCY_BOUNDS: Bounds = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LATENCY_BOUNDS: Bounds = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *VLLM_LATENCY_BOUNDS)
ITERATION_BOUNDS: Bounds = (1.0, *(float(2**power) for power in range(3, 15)))
CHOICES_BOUNDS: Bounds = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTION_BOUNDS: Bounds = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
COMPILE_BOUNDS: Bounds = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
MASK_BOUNDS: Bounds = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)

Value = float | Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric name. Its series have the label model_name, those of an engine also engine."""

    name: str  # without prefix; a counter's without _total
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()  # besides model_name and engine
    values: tuple[str, ...] = ()  # the closed set of the label's values
    engine: bool = True  # of one engine; else of all ingresses together
    read: Callable[[EngineStats], Value] | None = None  # gauges and counters of engines
    alias: bool = False  # vLLM has it
    alias_labels: tuple[str, ...] = ()  # if vLLM names them differently
    alias_bounds: Bounds = ()  # if vLLM has fewer buckets
    alias_constants: Mapping[str, str] = field(default_factory=dict)  # further labels of vLLM's
    alias_only: bool = False  # vLLM's alone


def _numbers(
    kind: Literal["gauge", "counter"],
    name: str,
    help: str,
    read: Callable[[EngineStats], Value] | None = None,
    label: str | None = None,
    values: tuple[str, ...] = (),
    alias: bool = False,
) -> Family:
    labels = () if label is None else (label,)
    return Family(
        name=name, kind=kind, help=help, labels=labels, values=values, read=read, alias=alias
    )


_gauge, _counter = partial(_numbers, "gauge"), partial(_numbers, "counter")


def _histogram(name: str, help: str, *, alias: bool = True, bounds: Bounds = ()) -> Family:
    return Family(name=name, kind="histogram", help=help, alias=alias, alias_bounds=bounds)


CACHE_LABELS = {  # our label of cache_config_info -> vLLM's
    "page_size": "block_size",
    "num_pages": "num_gpu_blocks",
    "num_pages_override": "num_gpu_blocks_override",
    "num_host_pages": "num_cpu_blocks",
    "size_tokens": "kv_cache_size_tokens",
    "max_concurrency": "kv_cache_max_concurrency",
    "dtype": "cache_dtype",
    "prefix_caching": "enable_prefix_caching",
    "memory_utilization": "gpu_memory_utilization",
    "memory_bytes": "kv_cache_memory_bytes",
}
CACHE_CONSTANTS = {  # vLLM's further labels: what Rayfin does not have
    "prefix_caching_hash_algo": "sha256",
    "is_attention_free": "False",
    **dict.fromkeys(("kv_sharing_fast_prefill", "use_replayssm", "use_kda_recoverssm"), "False"),
    **dict.fromkeys(
        (
            *("sliding_window", "kv_offloading_size", "kv_cache_layout", "prefix_match_unit"),
            *("mamba_block_size", "mamba_page_size_padded", "skip_page_size_padded"),
        ),
        "None",
    ),
    **dict.fromkeys(("mamba_cache_dtype", "mamba_ssm_cache_dtype"), "auto"),
    "mamba_cache_mode": "none",
    "kv_offloading_backend": "native",
}
CACHE_CONFIG = Family(
    name="cache_config_info",
    kind="gauge",
    help="1; the labels say how the KV cache is laid out.",
    labels=tuple(CACHE_LABELS),
    alias=True,
    alias_labels=tuple(CACHE_LABELS.values()),
    alias_constants=CACHE_CONSTANTS,
)
ENGINE_ASKED = _gauge(
    "engine_reported_timestamp_seconds", "When it was asked for its numbers, Unix time."
)
ENGINE_RESTARTS = _counter(
    "engine_restarts", "Times that an engine's scheduler was replaced, or the engine."
)


def _nothing(stats: EngineStats) -> Value:
    return 0


def _by_tier(stats: EngineStats) -> Value:
    return {"device": stats.tokens_cached}


ENGINE_GAUGES = (
    _gauge("num_requests_running", "Requests that hold a slot.", lambda s: s.running, alias=True),
    _gauge("num_requests_waiting", "Requests in the queue.", lambda s: s.waiting, alias=True),
    _gauge(
        "num_requests_waiting_by_reason",
        "Of those, for room; until suspects of a runner's death were tried or grammars compiled.",
        lambda s: {"capacity": s.waiting - s.deferred, "deferred": s.deferred},
        "reason",
        WAITING_REASONS,
        alias=True,
    ),
    _gauge("num_waiting_tokens", "Prompt tokens in the queue.", lambda s: s.waiting_tokens),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the KV pages in use, 0-1.",
        lambda s: s.pages_held / max(s.pages_total, 1),
        alias=True,
    ),
    _gauge("kv_cache_pages", "KV pages there are.", lambda s: s.pages_total),
    _gauge(
        "kv_cache_pages_by_state",
        "Held by requests; free, with content that can be found again; free.",
        lambda s: {
            "held": s.pages_held,
            "cached": s.pages_cached,
            "free": s.pages_total - s.pages_held - s.pages_cached,
        },
        "state",
        PAGE_STATES,
    ),
    _gauge(
        "swap_usage_perc",
        "Share of the swap space in use, 0-1.",
        lambda s: s.host_pages_held / max(s.host_pages_total, 1),
    ),
    _gauge("engine_epoch", "Grows whenever the runners are replaced.", lambda s: s.epoch),
    _gauge("engine_draining", "1 while it takes no new requests.", lambda s: s.draining),
    _gauge(
        "engine_sleep_state",
        "1 at the state that it is in; asleep is weights_offloaded, though they stay.",
        lambda s: {"awake": not s.asleep, "weights_offloaded": s.asleep},
        "sleep_state",
        SLEEP_STATES,
        alias=True,
    ),
    _gauge(
        "engine_stalled_seconds",
        "Since it finished a step, while it has work; 0 when idle.",
        lambda s: s.seconds_since_progress,
    ),
    _gauge("spare_runners", "Spare runners that are ready.", lambda s: s.spare_runners),
    _gauge("quarantine_suspects", "Requests on trial for a runner's death.", lambda s: s.suspects),
    _gauge("grammars_loaded", "Compiled grammars in the runner.", lambda s: s.grammars_loaded),
    _gauge("adapters_resident", "LoRA adapters in the runner.", lambda s: len(s.adapters.resident)),
    _gauge("adapter_bytes", "Memory of those adapters.", lambda s: s.adapters.bytes),
    _gauge("adapters_loading", "Adapters that requests wait for.", lambda s: s.adapters.loading),
    _gauge(
        "num_requests_waiting_for_adapters",
        "Those requests; they are among the deferred ones.",
        lambda s: s.adapters.requests_waiting,
    ),
    _gauge("image_cache_bytes", "Embeddings of images and clips.", lambda s: s.image_cache_bytes),
)

ENGINE_COUNTERS = (
    _counter("engine_steps", "Steps done.", lambda s: s.steps),
    _counter("step_seconds", "Time of the steps in the runners.", lambda s: s.step_seconds),
    _counter("runner_restarts", "Times the runners were replaced.", lambda s: s.runner_restarts),
    _counter(
        "num_preemptions",
        "Requests put back for want of pages.",
        lambda s: s.preemptions,
        alias=True,
    ),
    _counter(
        "num_preemptions_by_swap",
        "Of those, requests whose pages went to host memory.",
        lambda s: s.preemptions_by_swap,
    ),
    _counter("swapped_out_pages", "KV pages that went to host memory.", lambda s: s.swapped_out),
    _counter("swapped_in_pages", "KV pages that came back from it.", lambda s: s.swapped_in),
    _counter("disk_pages_read", "KV pages read from files.", lambda s: s.disk_pages_read),
    _counter("disk_pages_written", "KV pages written to files.", lambda s: s.disk_pages_written),
    _counter("disk_pages_unreadable", "Missing or broken.", lambda s: s.disk_pages_unreadable),
    _counter(
        "num_requests_requeued",
        "Requests put back because the runners were replaced.",
        lambda s: s.requeued_by_restart,
    ),
    _counter(
        "prefix_cache_queries",
        "Tokens looked up in the prefix index, at first admissions.",
        lambda s: s.prefix_queries,
        alias=True,
    ),
    _counter(
        "prefix_cache_hits",
        "Of those, tokens that were there.",
        lambda s: s.prefix_hits,
        alias=True,
    ),
    _counter(
        "kv_cache_evictions",
        "Pages whose content was given up for something new.",
        lambda s: s.evictions,
    ),
    _counter("prompt_tokens", "Prompt tokens taken in.", lambda s: s.prompt_tokens, alias=True),
    _counter(
        "prompt_tokens_by_source",
        "Tokens of admitted requests: computed, or found in the cache.",
        lambda s: {"local_compute": s.tokens_computed, "local_cache_hit": s.tokens_cached},
        "source",
        TOKEN_SOURCES,
        alias=True,
    ),
    _counter(
        "prompt_tokens_cached",
        "Tokens of admitted requests that were found in the cache.",
        lambda s: s.tokens_cached,
        alias=True,
    ),
    _counter("generation_tokens", "Tokens sampled.", lambda s: s.generation_tokens, alias=True),
    _counter(
        "request_success",
        "Requests that ended, by how.",
        lambda s: s.finished,
        "finished_reason",
        FINISH_REASONS,
        alias=True,
    ),
    _counter(
        "requests_moved",
        "Requests handed back unfinished, for another engine to go on with.",
        lambda s: s.finished.get("moved", 0),
    ),
    _counter("request_failures", "Requests that failed.", lambda s: s.failed, "code", FAILURES),
    _counter(
        "corrupted_requests",
        "Requests whose logits were not finite.",
        lambda s: s.failed.get("numerical_error", 0),
        alias=True,
    ),
    _counter(
        "admission_rejections",
        "Requests that the engine did not take.",
        lambda s: s.rejected,
        "reason",
        REJECTIONS,
        alias=True,
    ),
    _counter(
        "grammar_cache_hits",
        "Requests that began with a grammar that the runner had.",
        lambda s: s.grammar_hits,
    ),
    _counter(
        "grammar_cache_misses",
        "Requests that began with a grammar that the runner had to compile.",
        lambda s: s.grammar_misses,
    ),
    _counter(
        "grammar_failures",
        "Requests that failed by their grammar: at its compilation, at a token, by a slow mask.",
        lambda s: s.grammar_failures,
        "reason",
        GRAMMAR_FAILURES,
    ),
    _counter(
        "adapter_loads",
        "LoRA adapters that the runner read.",
        lambda s: s.adapters.loads,
        "result",
        LOAD_RESULTS,
    ),
    _counter(
        "adapter_evictions",
        "Adapters that left the runner's memory for others.",
        lambda s: s.adapters.evicted,
    ),
    _counter("image_cache_hits", "Media begun with embeddings kept.", lambda s: s.image_cache_hits),
    _counter("images_encoded", "Images and clips that were encoded.", lambda s: s.images_encoded),
    _counter(
        "image_cache_evictions",
        "Embeddings of images and clips that made room for others.",
        lambda s: s.image_cache_evictions,
    ),
    _counter(
        "spec_decode_num_drafts",
        "Drafts of requests that were verified in a step.",
        lambda s: s.spec_drafts,
        alias=True,
    ),
    _counter(
        "spec_decode_num_draft_tokens",
        "Tokens of those drafts.",
        lambda s: s.spec_draft_tokens,
        alias=True,
    ),
    _counter(
        "spec_decode_num_accepted_tokens",
        "Drafted tokens that were right.",
        lambda s: s.spec_accepted_tokens,
        alias=True,
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were right, by their place in the draft.",
        lambda s: s.spec_accepted_by_position,
        "position",
        DRAFT_POSITIONS,
        alias=True,
    ),
)

# What Rayfin does not have: vLLM's series are there, and stay at 0 where nothing can be counted.
ENGINE_ALIASES = tuple(
    replace(_counter(name, help, read, label, values, alias=True), alias_only=True)
    for name, help, read, label, values in (
        (
            "prompt_tokens_cached_by_source",
            "Tokens of admitted requests found in the cache, by where they were.",
            _by_tier,
            "source",
            CACHE_TIERS,
        ),
        *(
            (f"{cache}_cache_{what}", "Always 0: there is no such cache.", _nothing, None, ())
            for cache in ("external_prefix", "mm")
            for what in ("queries", "hits")
        ),
    )
)
LORA_INFO = replace(
    _gauge(
        "lora_requests_info",
        "The time of the report; the labels name adapters of running and of waiting requests.",
        alias=True,
    ),
    labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    alias_only=True,
)

ENGINE_HISTOGRAMS = (
    _histogram("request_prompt_tokens", "Prompt tokens of the requests that ended."),
    _histogram("request_generation_tokens", "Output tokens of the requests that ended."),
    _histogram("request_params_max_tokens", "The most tokens that they were to have."),
    _histogram(
        "request_prefill_kv_computed_tokens", "Tokens that were not in the cache at admission."
    ),
    _histogram("request_num_preemptions", "Times that they were put back for want of pages."),
    _histogram("iteration_tokens_total", "Tokens of a step: those of prompts, and those sampled."),
    _histogram(
        "request_queue_time_seconds",
        "From arrival in the engine to the first admission.",
        bounds=VLLM_LATENCY_BOUNDS,
    ),
    _histogram(
        "request_prefill_time_seconds",
        "From there to the first token.",
        bounds=VLLM_LATENCY_BOUNDS,
    ),
    _histogram(
        "request_decode_time_seconds",
        "From there to the last token.",
        bounds=VLLM_LATENCY_BOUNDS,
    ),
    _histogram(
        "request_inference_time_seconds",
        "From admission to the last token.",
        bounds=VLLM_LATENCY_BOUNDS,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Decode time by tokens after the first.",
        bounds=VLLM_ITL_BOUNDS,
    ),
    _histogram(
        "step_transport_seconds",
        "Of a step: to the runner and back, as far as the scheduler waited for it.",
        alias=False,
    ),
    _histogram("grammar_compile_seconds", "Of a grammar, in the runner.", alias=False),
    _histogram(
        "grammar_wait_seconds", "Of a request, for its grammar, before the queue.", alias=False
    ),
    _histogram("grammar_mask_seconds", "Of a step's masks, in the runner.", alias=False),
    _histogram("adapter_load_seconds", "Of a LoRA adapter, until the runner has it.", alias=False),
    _histogram("image_encode_seconds", "Of an image or clip, in the tower.", alias=False),
)


def _of_ingress(
    name: str,
    kind: Literal["gauge", "counter", "histogram"],
    help: str,
    labels: tuple[str, ...] = (),
    values: tuple[str, ...] = (),
    *,
    alias: bool = False,
    bounds: Bounds = (),
) -> Family:
    return Family(
        name=name,
        kind=kind,
        help=help,
        labels=labels,
        values=values,
        engine=False,
        alias=alias,
        alias_bounds=bounds,
    )


INGRESS_HEARD = _of_ingress(
    "ingress_reported_timestamp_seconds",
    "gauge",
    "Unix time of the oldest last report of an ingress.",
)
INGRESS_FAMILIES = (
    _of_ingress(
        "time_to_first_token_seconds",
        "histogram",
        "From the HTTP request's arrival to the first token at the edge.",
        alias=True,
    ),
    _of_ingress(
        "inter_token_latency_seconds",
        "histogram",
        "Between a request's tokens; those of one message share its gap.",
        alias=True,
        bounds=VLLM_ITL_BOUNDS,
    ),
    _of_ingress(
        "e2e_request_latency_seconds",
        "histogram",
        "From the HTTP request's arrival to the last token.",
        alias=True,
        bounds=VLLM_LATENCY_BOUNDS,
    ),
    _of_ingress(
        "ingress_time_seconds",
        "histogram",
        "From the HTTP request's arrival until it goes to an engine: checks, template, tokens.",
    ),
    _of_ingress(
        "first_flush_seconds",
        "histogram",
        "From a streamed HTTP request's arrival to the first event on the wire.",
    ),
    _of_ingress(
        "request_transport_seconds",
        "histogram",
        "To the engine, until its loop takes the request in, and back with the first token.",
    ),
    _of_ingress("request_params_n", "histogram", "Choices of a prompt.", alias=True),
    _of_ingress(
        "request_max_num_generation_tokens",
        "histogram",
        "Tokens of a prompt's longest choice.",
        alias=True,
    ),
    _of_ingress("client_disconnects", "counter", "Requests given up by their client."),
    _of_ingress(
        "request_replays",
        "counter",
        "Times that a request was sent again, its engine lost or the request handed back.",
        ("reason",),
        REPLAY_REASONS,
    ),
    _of_ingress("http_requests", "counter", "Answers, by route and status.", ("handler", "status")),
    _of_ingress("http_requests_in_flight", "gauge", "Requests for tokens that are not answered."),
    _of_ingress("ingress_replicas", "gauge", "Ingresses that were heard of lately."),
    INGRESS_HEARD,
    _of_ingress("batches_open", "gauge", "Batches that have not ended, by status.", ("status",)),
    _of_ingress("batch_lines_waiting", "gauge", "Lines of open batches without an answer."),
    _of_ingress(
        "batch_seconds_behind",
        "gauge",
        "How long after its window the latest open batch would end at its pace; 0: all in time.",
    ),
    _of_ingress("batch_lines", "counter", "Lines of batches, by what became of them.", ("result",)),
    _of_ingress(
        "guided_requests",
        "counter",
        "Requests with a grammar, by what it was made from.",
        ("kind",),
        GUIDED_KINDS,
    ),
    _of_ingress(
        "grammar_verdicts", "counter", "Grammars that were checked.", ("verdict",), VERDICTS
    ),
    _of_ingress("request_images", "histogram", "Images or clips of a request."),
    _of_ingress("image_fetch_seconds", "histogram", "Of an image or clip, from an address."),
    _of_ingress(
        "image_refusals", "counter", "Requests refused for media.", ("code",), IMAGE_REFUSALS
    ),
    _of_ingress("warden_restarts", "counter", "Times the process that checks them was replaced."),
    _of_ingress("tool_calls", "counter", "Tool calls in answers.", ("choice",), TOOL_CHOICES),
    _of_ingress("tool_calls_unparsed", "counter", "Calls that did not parse, given as text."),
    _of_ingress("tool_calls_cut", "counter", "Calls that the end of the answer cut off."),
    _of_ingress("reasoning_tokens", "counter", "Output tokens of thoughts."),
    _of_ingress("thinking_budgets_spent", "counter", "Thoughts that their budget ended."),
    _of_ingress(
        "output_format",
        "gauge",
        "Ingresses that read answers so; the labels name the formats of calls and of thoughts.",
        ("tools", "reasoning"),
    ),
)

FAMILIES = (
    *ENGINE_GAUGES,
    CACHE_CONFIG,
    ENGINE_ASKED,
    LORA_INFO,
    *ENGINE_COUNTERS,
    *ENGINE_ALIASES,
    ENGINE_RESTARTS,
    *ENGINE_HISTOGRAMS,
    *INGRESS_FAMILIES,
)

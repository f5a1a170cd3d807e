"""What an engine reports of itself: its counters, its histograms, and its state now."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from rayfin.actors.adapters.part import (
    ADAPTER_LOAD,
    ADAPTERS_INFO,
    ADAPTERS_RESIDENT,
    AdapterStats,
)
from rayfin.actors.metric import (
    COMPILE_BOUNDS,
    ITL_BOUNDS,
    LATENCY_BOUNDS,
    VLLM_ITL_BOUNDS,
    VLLM_LATENCY_BOUNDS,
    Bounds,
    Family,
    Histogram,
    counter,
    gauge,
    metrics_of,
)
from rayfin.actors.metrics.ledger import RESTARTS, CounterReport, Value
from rayfin.actors.settings.kv_events import KVEventSource
from rayfin.actors.speculation import MOST_TOKENS
from rayfin.actors.weights.version import BASE_LABEL

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTIONS = ("queue_full", "draining", "quarantined", "invalid")
FAILURES = (
    *("engine_error", "numerical_error", "request_quarantined", "deadline_exceeded"),
    *("engine_unavailable", "grammar_failed", "grammar_too_slow", "no_token_left", "other"),
)
LAPSES = ("price", "pages")
CARRIED = ("recomputed", "kept")
UPDATES = ("done", "refused", "failed")
UPDATE_PHASES = ("stage", "commit")
WEIGHT_SOURCES = ("path", "sent")
PAGE_SOURCES = ("disk", "p2p", "host")
GRAMMAR_FAILURES = ("compile", "failed", "too_slow")
DRAFT_POSITIONS = tuple(str(place) for place in range(MOST_TOKENS))


@dataclass(slots=True)
class EngineStats:
    """A snapshot of plain counters and gauges; the metrics hub and ``/health`` read it."""

    epoch: int = gauge("engine_epoch", "Grows whenever the runners are replaced.")
    steps: int = counter("engine_steps", "Steps done.")
    running: int = gauge("num_requests_running", "Requests that hold a slot.", alias=True)
    waiting: int = gauge("num_requests_waiting", "Requests in the queue.", alias=True)
    waiting_tokens: int = gauge("num_waiting_tokens", "Prompt tokens in the queue.")
    # Of background requests, which waiting_tokens leaves out.
    background_waiting_tokens: int = 0
    # Pages of running background requests; shared ones count for each.
    background_pages: int = 0
    pages_total: int = gauge("kv_cache_pages", "KV pages there are.")
    pages_held: int = 0
    # Pages that are free, with content that can be found again.
    pages_cached: int = 0
    host_pages_total: int = 0  # of swap space
    host_pages_held: int = 0
    pages_host: int = gauge("pages_host", "KV pages of the prefix cache in host memory.")
    page_size: int = 0
    preemptions: int = counter(
        "num_preemptions", "Requests put back for want of pages.", alias=True
    )
    preemptions_by_swap: int = counter(
        "num_preemptions_by_swap", "Of those, requests whose pages went to host memory."
    )
    parked: int = gauge("num_requests_parked", "Turns of sessions that wait for a seat.")
    sessions_seated: int = gauge(
        "num_sessions_seated", "Sessions whose pages are kept over their pauses."
    )
    session_tokens_again: int = counter(
        "session_tokens_recomputed", "Tokens that sessions had, lost, and computed again."
    )
    # Digests of those sessions.
    sessions: frozenset[bytes] = frozenset()
    # Free pages that no session and no pin claims; None: no heartbeat has come.
    pages_unclaimed: int | None = None
    session_lapses: dict[str, int] = counter(
        "session_lapses",
        "Sessions that lost their pages in a pause: to one that waits, or to what runs.",
        "reason",
        LAPSES,
    )
    swapped_out: int = counter("swapped_out_pages", "KV pages that went to host memory.")
    swapped_in: int = counter("swapped_in_pages", "KV pages that came back from it.")
    pages_read: dict[tuple[str, str], int] = counter(
        "pages_read",
        "KV pages asked for on the disk (disk), at other engines (p2p) or in host memory (host), "
        "and whether they came.",
        labels=("source", "result"),
        words=tuple(product(PAGE_SOURCES, ("arrived", "missing", "late"))),
    )
    page_bytes: dict[tuple[str, str], int] = counter(
        "page_bytes",
        "Bytes of KV pages read and written there.",
        labels=("source", "direction"),
        words=(
            *(("disk", "read"), ("disk", "written"), ("p2p", "read")),
            *(("host", "read"), ("host", "written")),
        ),
    )
    page_read_seconds: dict[str, float] = counter(
        "page_read_seconds", "Time of these reads.", "source", PAGE_SOURCES
    )
    requests_reading: int = gauge("requests_reading", "Requests that wait for pages.")
    disk_pages_written: int = counter("disk_pages_written", "KV pages written to files.")
    requeued_by_restart: int = counter(
        "num_requests_requeued", "Requests put back because the runners were replaced."
    )
    prefix_queries: int = counter(
        "prefix_cache_queries",
        "Tokens looked up in the prefix index, at first admissions.",
        alias=True,
    )
    prefix_hits: int = counter("prefix_cache_hits", "Of those, tokens that were there.", alias=True)
    evictions: int = counter(
        "kv_cache_evictions", "Pages whose content was given up for something new."
    )
    prompt_tokens: int = counter("prompt_tokens", "Prompt tokens taken in.", alias=True)
    generation_tokens: int = counter("generation_tokens", "Tokens sampled.", alias=True)
    # Tokens of requests at their first admission: not in the cache ...
    tokens_computed: int = 0
    # ... and in it.
    tokens_cached: int = counter(
        "prompt_tokens_cached",
        "Tokens of admitted requests that were found in the cache.",
        alias=True,
    )
    finished: dict[str, int] = counter(
        "request_success",
        "Requests that ended, by how.",
        "finished_reason",
        FINISH_REASONS,
        alias=True,
    )
    failed: dict[str, int] = counter("request_failures", "Requests that failed.", "code", FAILURES)
    rejected: dict[str, int] = counter(
        "admission_rejections",
        "Requests that the engine did not take.",
        "reason",
        REJECTIONS,
        alias=True,
    )
    # Requests that wait, and may not run beside others yet, or at all.
    deferred: int = 0
    suspects: int = gauge("quarantine_suspects", "Requests on trial for a runner's death.")
    spare_runners: int = gauge("spare_runners", "Spare runners that are ready.")
    runner_restarts: int = counter("runner_restarts", "Times the runners were replaced.")
    step_seconds: float = counter("step_seconds", "Time of the steps in the runners.", default=0.0)
    last_step_seconds: float = 0.0
    seconds_since_progress: float = gauge(
        "engine_stalled_seconds",
        "Since it finished a step, while it has work; 0 when idle.",
        default=0.0,
    )
    # Since the scheduler's loop turned.
    seconds_since_tick: float = 0.0
    draining: bool = gauge("engine_draining", "1 while it takes no new requests.", default=False)
    # It runs no requests, and has no pages.
    asleep: bool = False
    paused: bool = gauge("engine_paused", "1 while it is paused for new weights.", default=False)
    pause_seconds: float = counter("pause_seconds", "Time of its pauses.", default=0.0)
    weight_serial: int = gauge(
        "weights_serial", "Number of the weights that it computes by; 0 is the model's own."
    )
    # Label and digest of these weights.
    weights: tuple[str, str] = (BASE_LABEL, "")
    weight_updates: dict[str, int] = counter(
        "weight_updates",
        "New weights that it computes by since, that did not fit, and that failed.",
        "result",
        UPDATES,
    )
    weight_update_seconds: dict[str, float] = counter(
        "weight_update_seconds",
        "Time of these: beside its steps, and amid the pause.",
        "phase",
        UPDATE_PHASES,
    )
    weight_bytes: dict[str, int] = counter(
        "weight_bytes",
        "Bytes of new weights that it looked at, in a trainer's files or sent.",
        "source",
        WEIGHT_SOURCES,
    )
    carried_requests: dict[str, int] = counter(
        "carried_requests",
        "Requests that ran on with other weights, by what became of their pages.",
        "kv",
        CARRIED,
    )
    # How often its scheduler was replaced.
    generation: int = 0
    # A word of the life in which all this was counted.
    incarnation: str = ""
    grammars_loaded: int = gauge("grammars_loaded", "Compiled grammars in the runner.")
    grammar_hits: int = counter(
        "grammar_cache_hits", "Requests that began with a grammar that the runner had."
    )
    grammar_misses: int = counter(
        "grammar_cache_misses", "Requests that began with a grammar that the runner had to compile."
    )
    grammar_failures: dict[str, int] = counter(
        "grammar_failures",
        "Requests that failed by their grammar: at its compilation, at a token, by a slow mask.",
        "reason",
        GRAMMAR_FAILURES,
    )
    image_cache_bytes: int = gauge("image_cache_bytes", "Embeddings of images and clips.")
    image_cache_hits: int = counter("image_cache_hits", "Media begun with embeddings kept.")
    images_encoded: int = counter("images_encoded", "Images and clips that were encoded.")
    image_cache_evictions: int = counter(
        "image_cache_evictions", "Embeddings of images and clips that made room for others."
    )
    spec_drafts: int = counter(
        "spec_decode_num_drafts", "Drafts of requests that were verified in a step.", alias=True
    )
    spec_draft_tokens: int = counter(
        "spec_decode_num_draft_tokens", "Tokens of those drafts.", alias=True
    )
    spec_accepted_tokens: int = counter(
        "spec_decode_num_accepted_tokens", "Drafted tokens that were right.", alias=True
    )
    spec_accepted_by_position: dict[str, int] = counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were right, by their place in the draft.",
        "position",
        DRAFT_POSITIONS,
        alias=True,
    )
    plugin_seconds: Counter[str] = counter(
        "plugin_seconds", "Time in gates, observers, processors and proposers of --plugin.", "name"
    )
    adapters: AdapterStats = field(default_factory=AdapterStats)
    # By the name of the metric, of ENGINE_HISTOGRAMS.
    histograms: dict[str, Histogram] = field(default_factory=dict)
    # Seconds in which 1,000 tokens of a prompt are computed; 0.0 before the first ones.
    prompt_seconds: float = 0.0
    # And in which their pages are read from an engine, by its name; "": one not read from yet.
    read_seconds: dict[str, float] = field(default_factory=dict)
    # Where readers find the events of its pages.
    kv_events: KVEventSource | None = None
    # Values of CACHE_LABELS.
    cache_config: tuple[str, ...] = ()

    @property
    def pages_arrived(self) -> int:
        """Of ``pages_read``, those of any source that came."""
        return sum(self.pages_read.get((source, "arrived"), 0) for source in PAGE_SOURCES)


def _histogram(
    name: str, help: str, bounds: Bounds = (), *vllm: Bounds, alias: bool = True
) -> Family:
    return Family(
        name=name,
        kind="histogram",
        help=help,
        bounds=bounds,
        alias=alias,
        alias_bounds=vllm[0] if vllm else (),
    )


ITERATION_BOUNDS: Bounds = (1.0, *(float(2**power) for power in range(3, 15)))
PREEMPTION_BOUNDS: Bounds = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
MASK_BOUNDS: Bounds = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
LATENCIES = LATENCY_BOUNDS, VLLM_LATENCY_BOUNDS
ENGINE_HISTOGRAMS = (
    _histogram("request_prompt_tokens", "Prompt tokens of the requests that ended."),
    _histogram("request_generation_tokens", "Output tokens of the requests that ended."),
    _histogram("request_params_max_tokens", "The most tokens that they were to have."),
    _histogram(
        "request_prefill_kv_computed_tokens", "Tokens that were not in the cache at admission."
    ),
    _histogram(
        "request_num_preemptions",
        "Times that they were put back for want of pages.",
        PREEMPTION_BOUNDS,
    ),
    _histogram(
        "iteration_tokens_total",
        "Tokens of a step: those of prompts, and those sampled.",
        ITERATION_BOUNDS,
    ),
    _histogram(
        "request_queue_time_seconds",
        "From arrival in the engine to the first admission.",
        *LATENCIES,
    ),
    _histogram("request_prefill_time_seconds", "From there to the first token.", *LATENCIES),
    _histogram("request_decode_time_seconds", "From there to the last token.", *LATENCIES),
    _histogram("request_inference_time_seconds", "From admission to the last token.", *LATENCIES),
    _histogram(
        "request_time_per_output_token_seconds",
        "Decode time by tokens after the first.",
        ITL_BOUNDS,
        VLLM_ITL_BOUNDS,
    ),
    _histogram(
        "step_transport_seconds",
        "Of a step: to the runner and back, as far as the scheduler waited for it.",
        ITL_BOUNDS,
        alias=False,
    ),
    _histogram(
        "grammar_compile_seconds", "Of a grammar, in the runner.", COMPILE_BOUNDS, alias=False
    ),
    _histogram(
        "grammar_wait_seconds",
        "Of a request, for its grammar, before the queue.",
        COMPILE_BOUNDS,
        alias=False,
    ),
    _histogram(
        "grammar_mask_seconds", "Of a step's masks, in the runner.", MASK_BOUNDS, alias=False
    ),
    ADAPTER_LOAD,
    _histogram(
        "image_encode_seconds", "Of an image or clip, in the tower.", COMPILE_BOUNDS, alias=False
    ),
)

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
ASKED = Family(
    name="engine_reported_timestamp_seconds",
    kind="gauge",
    help="When it was asked for its numbers, Unix time.",
)

WAITING_REASONS = ("capacity", "deferred")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
PAGE_STATES = ("held", "cached", "free")
TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")

Read = Callable[[EngineStats], Value]


def _derived(
    kind: Literal["gauge", "counter"],
    name: str,
    help: str,
    read: Read,
    label: str = "",
    words: tuple[str, ...] = (),
    **more: Any,
) -> tuple[Family, Read]:
    labels = (label,) if label else ()
    return Family(name=name, kind=kind, help=help, labels=labels, words=words, **more), read


DERIVED: tuple[tuple[Family, Read], ...] = (
    _derived(
        "gauge",
        "num_requests_waiting_by_reason",
        "Of those, for room; until suspects of a runner's death were tried or grammars compiled.",
        lambda s: {"capacity": s.waiting - s.deferred, "deferred": s.deferred},
        "reason",
        WAITING_REASONS,
        alias=True,
    ),
    _derived(
        "gauge",
        "kv_cache_usage_perc",
        "Share of the KV pages in use, 0-1.",
        lambda s: s.pages_held / max(s.pages_total, 1),
        alias=True,
    ),
    _derived(
        "gauge",
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
    _derived(
        "gauge",
        "swap_usage_perc",
        "Share of the swap space in use, 0-1.",
        lambda s: s.host_pages_held / max(s.host_pages_total, 1),
    ),
    _derived(
        "gauge",
        "engine_sleep_state",
        "1 at the state that it is in; asleep is weights_offloaded, though they stay.",
        lambda s: {"awake": not s.asleep, "weights_offloaded": s.asleep},
        "sleep_state",
        SLEEP_STATES,
        alias=True,
    ),
    (
        Family(
            name="weights_info",
            kind="gauge",
            help="1; the label is the name of the weights that it computes by.",
            labels=("version",),
        ),
        lambda s: {(s.weights[0],): 1},
    ),
    (ADAPTERS_RESIDENT, lambda s: len(s.adapters.resident)),
    _derived(
        "counter",
        "prompt_tokens_by_source",
        "Tokens of admitted requests: computed, or found in the cache.",
        lambda s: {"local_compute": s.tokens_computed, "local_cache_hit": s.tokens_cached},
        "source",
        TOKEN_SOURCES,
        alias=True,
    ),
    _derived(
        "counter",
        "requests_moved",
        "Requests handed back unfinished, for another engine to go on with.",
        lambda s: s.finished.get("moved", 0),
    ),
    _derived(
        "counter",
        "corrupted_requests",
        "Requests whose logits were not finite.",
        lambda s: s.failed.get("numerical_error", 0),
        alias=True,
    ),
    # vLLM's series are there, and stay at 0 where nothing can be counted.
    _derived(
        "counter",
        "prompt_tokens_cached_by_source",
        "Tokens of admitted requests found in the cache, by where they were.",
        lambda s: {"device": s.tokens_cached},
        "source",
        CACHE_TIERS,
        alias=True,
        alias_only=True,
    ),
    *(
        _derived(
            "counter",
            f"mm_cache_{what}",
            "Always 0: there is no such cache.",
            lambda s: 0,
            alias=True,
            alias_only=True,
        )
        for what in ("queries", "hits")
    ),
    _derived(
        "counter",
        "external_prefix_cache_queries",
        "Tokens whose pages were asked for on the disk or at other engines.",
        lambda s: s.page_size * sum(s.pages_read.values()),
        alias=True,
        alias_only=True,
    ),
    _derived(
        "counter",
        "external_prefix_cache_hits",
        "Of those, tokens whose pages came.",
        lambda s: s.page_size * s.pages_arrived,
        alias=True,
        alias_only=True,
    ),
    (
        Family(
            name="cache_config_info",
            kind="gauge",
            help="1; the labels say how the KV cache is laid out.",
            labels=tuple(CACHE_LABELS),
            alias=True,
            alias_labels=tuple(CACHE_LABELS.values()),
            alias_constants=tuple(CACHE_CONSTANTS.items()),
        ),
        lambda s: {s.cache_config: 1} if s.cache_config else {},
    ),
)
"""Metrics that are no field of ``EngineStats``, and how they are read."""

ENGINE_METRICS = (
    *metrics_of(EngineStats, AdapterStats),
    *(metric for metric, _ in DERIVED),
    *(ASKED, ADAPTERS_INFO, RESTARTS),
    *ENGINE_HISTOGRAMS,
)


def engine_report(engine: str, stats: EngineStats, at: float) -> CounterReport:
    """Returns a scheduler's counters, zeros included, as of ``at`` in Unix time."""
    report = CounterReport(stats.incarnation, engine)
    report.put(ASKED, at)
    report.put(ADAPTERS_INFO, {stats.adapters.labels: at})
    report.read(stats)
    report.read(stats.adapters)
    for metric, read in DERIVED:
        report.put(metric, read(stats))
    for metric in ENGINE_HISTOGRAMS:
        if metric.name in stats.histograms:
            report.put(metric, stats.histograms[metric.name])
    return report

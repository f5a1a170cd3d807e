"""What an engine reports of itself: its counters, its histograms, and its state now."""

from dataclasses import dataclass, field

from rayfin.actors.adapters.usage import AdapterStats
from rayfin.actors.histogram import Histogram


@dataclass(slots=True)
class EngineStats:
    """A snapshot of plain counters and gauges; the metrics hub and ``/health`` read it."""

    epoch: int = 0
    steps: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # of prompts that wait for their first admission
    pages_total: int = 0
    pages_held: int = 0
    background_waiting_tokens: int = 0  # as waiting_tokens, which leaves background requests out
    background_pages: int = 0  # that running background requests hold; shared ones count for each
    host_pages_total: int = 0  # of swap space
    host_pages_held: int = 0
    preemptions: int = 0  # for want of pages ...
    preemptions_by_swap: int = 0  # ... and of those, with their pages kept in host memory
    requeued_by_restart: int = 0  # requests put back because the runners were replaced
    swapped_out: int = 0  # pages that went to host memory ...
    swapped_in: int = 0  # ... and came back
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix index, at first admissions
    prefix_hits: int = 0  # of those, tokens that were there
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests
    seconds_since_progress: float = 0.0  # 0 when idle
    last_step_seconds: float = 0.0
    draining: bool = False  # it takes no new requests
    asleep: bool = False  # nor runs any: it has no pages
    seconds_since_tick: float = 0.0  # since the scheduler's loop turned
    generation: int = 0  # how often its scheduler was replaced
    incarnation: str = ""  # unique to the life in which all this was counted
    page_size: int = 0
    pages_cached: int = 0  # free, with content that can be found again
    evictions: int = 0  # cached pages that were reused for new content
    deferred: int = 0  # requests that wait, and may not run beside others yet, or at all
    suspects: int = 0  # requests that were in flight when runners died, and are not cleared
    spare_runners: int = 0  # ready to take over from a runner that dies
    runner_restarts: int = 0
    step_seconds: float = 0.0  # of all steps, in the runner
    tokens_computed: int = 0  # of requests at their first admission: not in the cache ...
    tokens_cached: int = 0  # ... and in it
    rejected: dict[str, int] = field(default_factory=dict)  # reason -> requests not taken
    failed: dict[str, int] = field(default_factory=dict)  # error code -> requests
    grammars_loaded: int = 0  # in the runner
    grammar_hits: int = 0  # rows that began with a grammar that the runner had ...
    grammar_misses: int = 0  # ... and with one that it had to compile
    grammar_failures: dict[str, int] = field(default_factory=dict)  # reason -> requests
    spec_drafts: int = 0  # rows of steps with drafted tokens ...
    spec_draft_tokens: int = 0  # ... and those tokens ...
    spec_accepted_tokens: int = 0  # ... and of them the right ones ...
    spec_accepted_by_position: dict[str, int] = field(default_factory=dict)  # ... by place, from 0
    image_cache_bytes: int = 0  # of images' embeddings in the runner
    image_cache_hits: int = 0  # images that began with embeddings that were there ...
    images_encoded: int = 0  # ... and images that the tower computed
    image_cache_evictions: int = 0  # embeddings that made room for others
    histograms: dict[str, Histogram] = field(default_factory=dict)  # name in families.py -> it
    cache_config: tuple[str, ...] = ()  # values of families.CACHE_LABELS
    adapters: AdapterStats = field(default_factory=AdapterStats)
    disk_pages_read: int = 0  # from files ...
    disk_pages_written: int = 0  # ... to them ...
    disk_pages_unreadable: int = 0  # ... and that were to be read, and did not come

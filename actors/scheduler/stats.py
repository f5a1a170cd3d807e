"""Builds ``EngineStats``, from any thread, the log line of them, and ``EngineSnapshot``."""

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import SchedulerInfo
from rayfin.actors.metrics.engine_stats import CACHE_LABELS, EngineStats
from rayfin.actors.metrics.snapshot import (
    FREE,
    KEPT,
    SHARED,
    EngineSnapshot,
    PagesView,
    RunningView,
    StepView,
    WaitingView,
)
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.actors.timing import STATUS_LINE_SECONDS
from rayfin.cache.page_tables import PageTables

COSTED_TOKENS = 1000
"""Of the prompt whose cost engines report."""


def take_stats(
    config: EngineConfig, lifecycle: Lifecycle, *, suspects: int, **of_engine: Any
) -> EngineStats:
    """The counters, the sizes of all tables, and the fields ``of_engine``."""
    state, counters, seats = lifecycle.state, lifecycle.state.counters, lifecycle.seats
    loading, requests_waiting = lifecycle.preparations.preparing(AdapterRef)
    return counters.snapshot(
        running=len(state.running),
        waiting=len(state.waiting) + lifecycle.num_beside,
        parked=0 if seats is None else len(seats),
        pages_unclaimed=state.tables.num_unclaimed,
        sessions=frozenset() if seats is None else seats.sessions.digests(),
        sessions_seated=0 if seats is None else seats.sessions.num_seated,
        waiting_tokens=state.queue_limits.num_tokens,
        pages_total=config.num_pages,
        pages_held=state.tables.num_held,
        background_waiting_tokens=state.queue_limits.num_background_tokens,
        background_pages=int(state.tables.held[state.waiting.slots].sum()),
        host_pages_total=config.num_host_pages,
        host_pages_held=lifecycle.preemption.num_held,
        page_size=config.page_size,
        pages_cached=state.tables.num_cached,
        pages_host=0 if (host := state.host) is None or host.index is None else len(host.index),
        evictions=state.tables.num_evicted,
        requests_reading=len(lifecycle.tier),
        prompt_seconds=state.prompt_cost.seconds(0, COSTED_TOKENS),
        read_seconds=lifecycle.tier.read_seconds(COSTED_TOKENS),
        deferred=min(suspects, len(state.waiting)) + lifecycle.num_beside,
        suspects=suspects,
        cache_config=cache_config(config),
        adapters=counters.of_adapters.stats(
            config.parts,
            list(state.live.values()),
            loading=loading,
            requests_waiting=requests_waiting,
        ),
        **of_engine,
    )


def cache_config(config: EngineConfig) -> tuple[str, ...]:
    """The labels of ``cache_config_info``: the values of CACHE_LABELS."""
    tokens = config.capacity
    values = {
        "page_size": config.page_size,
        "num_pages": config.num_pages,
        "num_pages_override": config.num_pages_asked,
        "num_host_pages": config.num_host_pages,
        "size_tokens": tokens,
        "max_concurrency": round(tokens / config.max_model_len, 2),
        "dtype": config.kv_cache_dtype,
        "prefix_caching": config.prefix_caching,
        "memory_utilization": config.memory_utilization,
        "memory_bytes": config.kv_cache_memory,
    }
    return tuple(str(values[name]) for name in CACHE_LABELS)


MOST_SHOWN = 64
"""Most running and most waiting requests in a snapshot."""

MOST_PAGES = 8192
"""Most pages in a snapshot's map; the pool allocates low numbers first."""


def take_snapshot(
    name: str,
    state: SchedulerState,
    stats: EngineStats,
    step: SchedulerInfo | None,
    now: float,
) -> EngineSnapshot:
    """The engine at ``now`` on its clock; for the thread that steps.

    O(live requests + pages shown): some milliseconds at ten thousand.
    """
    running, tables = state.running, state.tables
    holders = running.holders()
    shown = holders[:MOST_SHOWN]
    queue = (request for request in state.live.values() if request.slot is None)
    waiting = [
        WaitingView(request.order, len(request.source.prompt), now - request.arrival)
        for request in heapq.nsmallest(MOST_SHOWN, queue, key=lambda request: request.order)
    ]
    return EngineSnapshot(
        name=name,
        epoch=stats.epoch,
        steps=stats.steps,
        num_running=len(holders),
        num_waiting=stats.waiting,
        running=[_view(state, request) for request in shown],
        waiting=waiting,
        step=_step(step, stats),
        pages=PagesView(
            stats.pages_total,
            tables.page_size,
            page_map(
                tables, [request.slots for request in shown], [request.slots for request in holders]
            ),
        ),
        totals={
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "preemptions": stats.preemptions,
            "pages_read": stats.pages_arrived,
            "moved": stats.finished.get("moved", 0),
            "requeued": stats.requeued_by_restart,
            "finished": stats.finished,
        },
    )


def page_map(
    tables: PageTables, shown: Sequence[Sequence[int]], holders: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """The first MOST_PAGES pages by owner, run-length encoded.

    Args:
        shown: slots of each request that is named in the snapshot.
        holders: slots of all requests; pages of those not shown count as shared.
    """
    count = min(tables.pool.num_pages, MOST_PAGES)
    owners = np.full(tables.pool.num_pages, FREE, np.int64)
    if tables.index is not None:
        owners[[page for page in range(count) if page in tables.index]] = KEPT
    for number, slots in enumerate(holders):
        owner = number if number < len(shown) else SHARED
        for slot in slots:
            pages = tables.pages_of(slot)
            taken = owners[pages] >= 0
            owners[pages] = np.where(taken & (owners[pages] != owner), SHARED, owner)
    held_by_many = np.array(tables.pool.references[:count]) > 1
    owners = owners[:count]
    owners[held_by_many & (owners >= 0)] = SHARED
    starts = np.flatnonzero(np.diff(owners, prepend=np.nan) != 0)
    lengths = np.diff(starts, append=count)
    return list(zip(owners[starts].tolist(), lengths.tolist(), strict=True))


def _view(state: SchedulerState, request: Request) -> RunningView:
    running, slots = state.running, request.slots
    prompt = len(request.source.prompt)
    held = {page for slot in slots for page in state.tables.pages_of(slot)}
    return RunningView(
        id=request.order,
        phase="prefill" if slots[0] in running.prefilling else "decode",
        prompt=prompt,
        cached=request.cached_tokens,
        output=max(0, int(running.num_known[slots[0]]) - prompt),
        pages=len(held),
    )


def _step(info: SchedulerInfo | None, stats: EngineStats) -> StepView:
    if info is None:
        return StepView()
    tokens = int(info.chunk_len[info.decoding_batch :].sum())
    return StepView(
        info.decoding_batch, info.prefill_batch, tokens, stats.last_step_seconds / info.num_steps
    )


class StatusLine:
    """Renders what the engine did since the last line, like vLLM's periodic log."""

    def __init__(self, before: EngineStats, now: float) -> None:
        self._before = before
        self._at = now

    def render(self, stats: EngineStats, now: float) -> str | None:
        """Returns the line for the time until ``now``, in seconds, or None if the engine idled."""
        before, seconds = self._before, max(now - self._at, 1e-9)
        self._before, self._at = stats, now
        prompts = stats.prompt_tokens - before.prompt_tokens
        outputs = stats.generation_tokens - before.generation_tokens
        if not (stats.running or stats.waiting or prompts or outputs):
            return None
        queries = stats.prefix_queries - before.prefix_queries
        hits = (stats.prefix_hits - before.prefix_hits) / queries if queries else 0.0
        return (
            f"running {stats.running}, waiting {stats.waiting}, "
            f"pages {stats.pages_held}/{stats.pages_total}, "
            f"prompts {prompts / seconds:.1f} tokens/s, outputs {outputs / seconds:.1f} tokens/s, "
            f"prefix hits {hits:.0%}, preemptions {stats.preemptions - before.preemptions}"
        )


def log_status(stats: Callable[[], EngineStats], write: Callable[[str], None]) -> None:
    """Writes a status line every few seconds from a new thread, which also calls ``stats``."""
    line = StatusLine(stats(), time.monotonic())

    def run() -> None:
        while True:
            time.sleep(STATUS_LINE_SECONDS)
            text = line.render(stats(), time.monotonic())
            if text is not None:
                write(text)

    threading.Thread(target=run, name="status line", daemon=True).start()

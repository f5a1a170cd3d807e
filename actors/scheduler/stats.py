"""Takes an engine's ``EngineStats``: reads counters, changes nothing; from any thread."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import (
    FREE,
    KEPT,
    SHARED,
    EngineSnapshot,
    EngineStats,
    PagesView,
    RunningView,
    SchedulerInfo,
    StepView,
    WaitingView,
)
from rayfin.actors.scheduler.core.lifecycle import Lifecycle
from rayfin.actors.scheduler.state.request import Request
from rayfin.cache.page_tables import PageTables


def take_stats(
    own: EngineStats,
    config: EngineConfig,
    lifecycle: Lifecycle,
    *,
    epoch: int,
    stalled: float,
    suspects: int,
) -> EngineStats:
    """The counters of all parts, beside those that the engine keeps itself in ``own``."""
    counts, tables, preemption = lifecycle.counts, lifecycle.tables, lifecycle.preemption
    return replace(
        own,
        epoch=epoch,
        running=len(lifecycle.running),
        waiting=len(lifecycle.waiting),
        waiting_tokens=lifecycle.newcomers.num_tokens,
        pages_held=tables.num_held,
        host_pages_total=config.num_host_pages,
        host_pages_held=preemption.num_held,
        preemptions=lifecycle.num_preemptions,
        preemptions_by_swap=preemption.counts.preemptions,
        requeued_by_restart=lifecycle.num_requeued,
        swapped_out=preemption.counts.pages_out,
        swapped_in=preemption.counts.pages_in,
        prefix_queries=lifecycle.prefix_queries,
        prefix_hits=lifecycle.prefix_hits,
        finished=dict(lifecycle.num_finished),
        seconds_since_progress=stalled,
        incarnation=counts.incarnation,
        page_size=config.page_size,
        pages_cached=tables.num_cached,
        evictions=tables.num_evicted,
        deferred=min(suspects, len(lifecycle.waiting)),
        suspects=suspects,
        runner_restarts=counts.runner_restarts,
        step_seconds=counts.step_seconds,
        tokens_computed=counts.tokens_computed,
        tokens_cached=counts.tokens_cached,
        rejected=dict(counts.rejected),
        failed=dict(counts.failed),
        histograms=counts.histograms(),
    )


# Takes an ``EngineSnapshot``: reads the lifecycle between two steps, changes nothing.

MOST_SHOWN = 64
"""Requests of each kind in a snapshot: a page of them, however many there are."""

MOST_PAGES = 8192
"""Pages in a snapshot's map; the pool hands out low numbers first."""


def take_snapshot(
    name: str,
    lifecycle: Lifecycle,
    live: Iterable[Request],
    stats: EngineStats,
    step: SchedulerInfo | None,
    now: float,
) -> EngineSnapshot:
    """What goes on, on the engine's clock ``now``; for the thread that steps.

    O(``live`` requests + pages shown): some milliseconds at ten thousand, while somebody watches.
    """
    running, tables = lifecycle.running, lifecycle.tables
    holders = running.holders()
    shown = holders[:MOST_SHOWN]
    queue = (own for own in live if own.slot is None)
    waiting = [
        WaitingView(own.order, len(own.source.prompt), now - own.arrival)
        for own in heapq.nsmallest(MOST_SHOWN, queue, key=lambda own: own.order)
    ]
    return EngineSnapshot(
        name=name,
        epoch=stats.epoch,
        steps=stats.steps,
        num_running=len(holders),
        num_waiting=len(lifecycle.waiting),
        running=[_view(lifecycle, own) for own in shown],
        waiting=waiting,
        step=_step(step, stats),
        pages=PagesView(
            stats.pages_total,
            tables.page_size,
            page_map(tables, [own.slots for own in shown], [own.slots for own in holders]),
        ),
        totals={
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "preemptions": stats.preemptions,
            "requeued": stats.requeued_by_restart,
            "finished": stats.finished,
        },
    )


def page_map(
    tables: PageTables, shown: Sequence[Sequence[int]], holders: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """The first MOST_PAGES pages by owner, run-length encoded.

    ``shown`` are the slots of each request that may be named; pages of the others of ``holders``
    count as shared.
    """
    count = min(tables.pool.num_pages, MOST_PAGES)
    owners = np.full(tables.pool.num_pages, FREE, np.int64)
    if tables.index is not None:
        owners[[page for page in range(count) if page in tables.index]] = KEPT
    for number, slots in enumerate(holders):
        owner = number if number < len(shown) else SHARED
        for slot in slots:
            pages = tables.pages_since(slot, 0)
            taken = owners[pages] >= 0
            owners[pages] = np.where(taken & (owners[pages] != owner), SHARED, owner)
    held_by_many = np.array(tables.pool.references[:count]) > 1
    owners = owners[:count]
    owners[held_by_many & (owners >= 0)] = SHARED
    starts = np.flatnonzero(np.diff(owners, prepend=np.nan) != 0)
    lengths = np.diff(starts, append=count)
    return list(zip(owners[starts].tolist(), lengths.tolist(), strict=True))


def _view(lifecycle: Lifecycle, request: Request) -> RunningView:
    running, slots = lifecycle.running, request.slots
    prompt = len(request.source.prompt)
    held = {page for slot in slots for page in lifecycle.tables.pages_since(slot, 0)}
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

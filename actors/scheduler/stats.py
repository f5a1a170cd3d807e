"""Takes an engine's ``EngineStats``: reads counters, changes nothing; from any thread."""

from dataclasses import replace

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import EngineStats
from rayfin.actors.scheduler.lifecycle import Lifecycle


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

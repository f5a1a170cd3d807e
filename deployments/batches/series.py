"""The metrics of batches."""

from collections import Counter
from collections.abc import Iterable

from rayfin.actors.metrics.ledger import CounterReport
from rayfin.deployments.batches.objects import StoredBatch
from rayfin.deployments.batches.worker import WorkerCounts
from rayfin.deployments.telemetry.ingress_counters import BatchCounters


def add_series(
    report: CounterReport, batches: Iterable[StoredBatch], counts: WorkerCounts, now: float
) -> None:
    """Adds what the folder's batches and the worker's counts say to a report."""
    open_batches = [batch for batch in batches if not batch.ended]
    report.read(
        BatchCounters(
            open=Counter(batch.status for batch in open_batches),
            lines_waiting=sum(
                batch.total - batch.completed - batch.failed for batch in open_batches
            ),
            seconds_behind=max((seconds_behind(batch, now) for batch in open_batches), default=0.0),
            lines=counts.lines,
        )
    )


def seconds_behind(batch: StoredBatch, now: float) -> float:
    """How long after its window the batch ends at its pace until now; 0 if it ends in time.

    Without any answer the pace is not known: then it counts from half of the window on.
    """
    done, left = batch.completed + batch.failed, batch.expires_at - now
    begun = batch.times.get("in_progress", batch.created_at)
    if not batch.total or done >= batch.total:
        return 0.0
    if not done:
        return max(0.0, (now - begun) - left)
    needed = (now - begun) / done * (batch.total - done)
    return max(0.0, needed - left)

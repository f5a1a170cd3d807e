"""Runs the open batches of a folder: leases them, sends their lines, and keeps their answers.

A worker may die at any point, and the next one goes on from what the folder holds. An answer counts
when it is appended and synced; the ids in both answer files say what is not to be computed again.
So a line may be computed twice, and is never answered twice.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from rayfin.actors.errors import StorageFull
from rayfin.actors.metrics.ledger import CounterReport
from rayfin.actors.timing import (
    BATCH_POLL_SECONDS,
    BATCH_RETRY_SECONDS,
    BATCH_SWEEP_SECONDS,
)
from rayfin.deployments.batches.answers import AnswerFile, Known, LineAnswer, sort_answers
from rayfin.deployments.batches.folder import BatchFolder, BatchLease
from rayfin.deployments.batches.line_run import LineRun, finished_thread
from rayfin.deployments.batches.lines import Line, LineReader, id_hash, parse_line
from rayfin.deployments.batches.objects import StoredBatch
from rayfin.deployments.batches.sender import LineSender
from rayfin.deployments.batches.validation import validate
from rayfin.deployments.telemetry.ingress_counters import BatchCounters

logger = logging.getLogger(__name__)

BATCHES_AT_ONCE = 4
"""Batches that run at once, the oldest first; they share ``concurrency``."""

TENANT = "x-batch-tenant"
"""The header by which a line's tenant reaches the application in the worker's process."""

WINDOW_ENDED = {
    "code": "batch_expired",
    "message": "The batch's window ended before this line ran.",
}


@dataclass(slots=True)
class WorkerCounts:
    """What one worker has done since its start, for metrics."""

    lines: Counter[str] = field(default_factory=Counter)  # by "ok", "error", "expired"
    ended: Counter[str] = field(default_factory=Counter)  # batches, by status
    running: int = 0


class BatchWorker:
    """Works on the batches of a folder until it is closed; several may share one folder.

    Args:
        client: reaches the routes.
        serves: whether lines may name a model; called in threads.
        concurrency: lines in flight, of all batches together.
    """

    def __init__(
        self,
        folder: BatchFolder,
        client: httpx.AsyncClient,
        serves: Callable[[str], bool],
        concurrency: int,
    ) -> None:
        self.counts = WorkerCounts()
        self._folder = folder
        self._client = client
        self.serves = serves
        self._concurrency = concurrency
        self._in_flight = asyncio.Semaphore(concurrency)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until it is cancelled; then what is in flight is dropped."""
        swept = 0.0
        try:
            while True:
                if time.monotonic() - swept > BATCH_SWEEP_SECONDS or not swept:
                    swept = time.monotonic()
                    await self._guarded(self._sweep)
                await self._guarded(self._look)
                await asyncio.sleep(BATCH_POLL_SECONDS)
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, work: Callable[[], Sequence[BatchLease]]) -> None:
        """Works on what is leased; an error of the file system does not end the worker."""
        try:
            leases = await asyncio.to_thread(work)
        except OSError as error:
            logger.warning("the folder of batches: %s", error)
            return
        for lease in leases:
            task = asyncio.create_task(self._work(lease))
            self._running[lease.batch.id] = task

    def _sweep(self) -> list[BatchLease]:
        self._folder.sweep()
        return []

    def _look(self) -> list[BatchLease]:
        """Leases open batches, the oldest first, as far as there is room."""
        leases: list[BatchLease] = []
        for batch in reversed(self._folder.batches()):
            if len(self._running) + len(leases) >= BATCHES_AT_ONCE:
                break
            if batch.ended or batch.id in self._running:
                continue
            lease = self._folder.lease(batch.id)
            if lease is not None:
                leases.append(lease)
        return leases

    async def _work(self, lease: BatchLease) -> None:
        batch = lease.batch
        self.counts.running += 1
        try:
            await BatchRun(lease, self._folder, self).run()
            self.counts.ended[batch.status] += 1
            logger.info("batch %s: %s", batch.id, batch.status)
        except (OSError, StorageFull) as error:
            # What is written stays; another attempt goes on when there is room.
            logger.warning("batch %s waits: %s", batch.id, error)
            await asyncio.sleep(BATCH_RETRY_SECONDS)
        except Exception:
            logger.exception("batch %s waits", batch.id)
            await asyncio.sleep(BATCH_RETRY_SECONDS)
        finally:
            self.counts.running -= 1
            lease.close()
            self._running.pop(batch.id, None)

    def sender(self, batch: str, tenant: str) -> LineSender:
        return LineSender(self._client, batch=batch, headers={TENANT: tenant})

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @property
    def in_flight(self) -> asyncio.Semaphore:
        return self._in_flight


class BatchRun:
    """One batch, from where its record and its answers say it is, to its end."""

    def __init__(self, lease: BatchLease, folder: BatchFolder, worker: BatchWorker) -> None:
        self._lease = lease
        self._batch = lease.batch
        self._folder = folder
        self._worker = worker
        self._known = Known()
        self._output: AnswerFile | None = None
        self._errors: AnswerFile | None = None

    async def run(self) -> None:
        """Raises:
        OSError, StorageFull: the folder cannot be written; nothing that was written is lost.
        """
        batch = self._batch
        if batch.status == "validating" and not await self._validated():
            return
        try:
            await finished_thread(self._open)
            ending = await self._lines_answered() if batch.status != "finalizing" else "completed"
            if ending == "expired":
                await finished_thread(self._expire)
        finally:
            await finished_thread(self._close)
        await finished_thread(self._finish, ending)

    async def _validated(self) -> bool:
        """Whether the batch goes on; else it has failed or is cancelled."""
        batch, lease = self._batch, self._lease
        outcome = await asyncio.to_thread(
            validate,
            *(lease.input, batch.endpoint, self._worker.serves, self._folder.limits.max_lines),
            lambda: lease.cancelled,
        )
        if outcome is None:
            batch.enter("cancelling")
            await finished_thread(self._finish, "cancelled")
            return False
        batch.total, batch.errors = outcome
        if batch.errors:
            batch.enter("failed")
            await finished_thread(lease.save)
            lease.clean()
            return False
        batch.enter("in_progress")
        await finished_thread(lease.save)
        return True

    async def _lines_answered(self) -> str:
        """Sends what has no answer. Returns the status that the batch ends with."""
        batch, worker = self._batch, self._worker
        sender = worker.sender(batch.id, batch.tenant)

        async def send(line: Line) -> LineAnswer:
            async with worker.in_flight:
                return await sender.send(line)

        if ending := await self._interrupted():
            return ending
        running = LineRun(self._lines(), send, self._record, worker.concurrency)
        task = asyncio.create_task(running.run())
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=BATCH_POLL_SECONDS)
                if done:
                    task.result()
                    if (missing := batch.total - batch.completed - batch.failed) != 0:
                        raise OSError(f"{missing} lines of {batch.id} are not recorded")
                    return "completed"
                if ending := await self._interrupted():
                    return ending
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _interrupted(self) -> str | None:
        """The status that the batch must end with now, or None."""
        if await asyncio.to_thread(lambda: self._lease.cancelled):
            self._batch.enter("cancelling")
            return "cancelled"
        return "expired" if time.time() >= self._batch.expires_at else None

    def _open(self) -> None:
        self._output = AnswerFile.open(self._lease.output, self._known)
        self._errors = AnswerFile.open(self._lease.errors, self._known)
        self._count()

    def _count(self) -> None:
        """What is recorded, in the batch's record."""
        batch, known = self._batch, self._known
        batch.completed, batch.failed, batch.usage = known.ok, known.failed, dict(known.usage)

    def _close(self) -> None:
        for file in (self._output, self._errors):
            if file is not None:
                file.close()

    def _lines(self) -> Iterator[Line]:
        """The lines without an answer; all have passed validation."""
        with self._lease.input.open("rb") as file:
            for number, data in LineReader(file):
                line = parse_line(number, data)
                if id_hash(line.custom_id) not in self._known.ids:
                    yield line

    def _record(self, answers: list[LineAnswer]) -> None:
        assert self._output is not None and self._errors is not None
        good = [answer for answer in answers if answer.ok]
        bad = [answer for answer in answers if not answer.ok]
        for file, group in ((self._output, good), (self._errors, bad)):
            if group:
                file.append(b"".join(answer.line() for answer in group))
                for answer in group:
                    self._known.add(answer.custom_id, answer.number, answer.body, ok=answer.ok)
        self._count()
        self._worker.counts.lines["ok"] += len(good)
        self._worker.counts.lines["error"] += len(bad)
        self._lease.save()

    def _expire(self) -> None:
        """Every line without an answer gets the error that its window has ended."""
        assert self._errors is not None
        group: list[LineAnswer] = []
        for line in self._lines():
            group.append(LineAnswer(line.custom_id, line.number, error=WINDOW_ENDED))
            if len(group) == 1000:
                self._add_expired(group)
                group = []
        self._add_expired(group)

    def _add_expired(self, group: list[LineAnswer]) -> None:
        assert self._errors is not None
        self._errors.append(b"".join(answer.line() for answer in group))
        self._worker.counts.lines["expired"] += len(group)
        self._batch.failed += len(group)
        self._batch.expired += len(group)

    def _sort(self) -> None:
        """The answers get the order of the input."""
        answers = [path for path in (self._lease.output, self._lease.errors) if path.exists()]
        if answers:
            with self._lease.input.open("rb") as file:
                lines = (parse_line(*numbered) for numbered in LineReader(file))
                numbers = {id_hash(line.custom_id): line.number for line in lines}
            for path in answers:
                sort_answers(path, numbers)

    def _finish(self, ending: str) -> None:
        """Publishes the answers; every step may be done again by another worker."""
        batch, lease = self._batch, self._lease
        if ending == "completed":
            batch.enter("finalizing")
            lease.save()
        self._sort()
        lease.publish()
        batch.enter(ending)
        lease.save()
        lease.clean()


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
    """Returns how long after its window the batch ends at its pace until now; 0 if it ends in time.

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

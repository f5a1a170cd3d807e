"""Keeps many lines in flight, and records their answers in groups."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

from rayfin.actors.errors import ServerError
from rayfin.actors.timing import BATCH_RECORD_SECONDS
from rayfin.deployments.batches.answers import LineAnswer
from rayfin.deployments.batches.lines import Line

T = TypeVar("T")

READ_AHEAD = 4
"""Lines that are read ahead, for each that may be in flight."""

RECORD_LINES = 256
"""Answers that are recorded together at most."""

Work = Line | LineAnswer
"""A line to send; or the answer of one that cannot be sent."""


class LineRun:
    """Sends lines, ``concurrency`` at once, until they or the patience of its owner end.

    Args:
        lines: what to do, read in a thread, a few at a time.
        send: returns a line's answer. After ``stop`` it may fail.
        record: makes answers durable; called in a thread, one call at a time. An answer counts
            from its return on.
    """

    def __init__(
        self,
        lines: Iterator[Work],
        send: Callable[[Line], Awaitable[LineAnswer]],
        record: Callable[[list[LineAnswer]], None],
        concurrency: int,
    ) -> None:
        self._lines = lines
        self._send = send
        self._record = record
        self._concurrency = concurrency
        self._reading = asyncio.Lock()
        self._read: list[Work] = []  # last first
        self._answers: list[LineAnswer] = []
        self._recording = asyncio.Lock()
        self._broken = False  # a record failed: no later one may come
        self.stopped = False
        self.allowed = asyncio.Event()  # cleared: no further line is sent for now
        self.allowed.set()

    async def run(self) -> None:
        """Returns when every line is recorded, or those in flight after ``stop``.

        Cancellation drops what is in flight; what has an answer is recorded.

        Raises:
            ServerError: of ``send``, before ``stop``.
            OSError: of ``record`` or of reading.
        """
        try:
            async with asyncio.TaskGroup() as group:
                recorder = group.create_task(self._record_often())
                senders = [group.create_task(self._send_lines()) for _ in range(self._concurrency)]
                await asyncio.wait(senders)
                recorder.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._record_now()

    def stop(self) -> None:
        """Sends no further line; ``run`` returns when those in flight are answered."""
        self.stopped = True
        self.allowed.set()

    async def _send_lines(self) -> None:
        while (work := await self._next()) is not None:
            try:
                answer = await self._send(work) if isinstance(work, Line) else work
            except ServerError:
                if not self.stopped:
                    raise
                return
            self._answers.append(answer)
            if len(self._answers) >= RECORD_LINES:
                await self._record_now()

    async def _next(self) -> Work | None:
        await self.allowed.wait()
        async with self._reading:
            if not self._read and not self.stopped:
                count = READ_AHEAD * self._concurrency
                self._read = await asyncio.to_thread(lambda: list(islice(self._lines, count)))
                self._read.reverse()
        if self.stopped or not self._read:
            return None
        return self._read.pop()

    async def _record_often(self) -> None:
        while True:
            await asyncio.sleep(BATCH_RECORD_SECONDS)
            await self._record_now()

    async def _record_now(self) -> None:
        async with self._recording:
            answers, self._answers = self._answers, []
            if answers and not self._broken:
                try:
                    await finished_thread(self._record, answers)
                except Exception:
                    # It may be recorded in part, so it is not tried again here.
                    self._broken = True
                    raise


async def finished_thread(function: Callable[..., T], *args: Any) -> T:
    """``asyncio.to_thread`` that ends with its thread, also when it is cancelled.

    Raises:
        Exception: the function's, also then.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        work.result()
        raise

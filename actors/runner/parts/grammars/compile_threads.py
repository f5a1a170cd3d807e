"""Threads that compile grammars, beside steps or within one.

Compilation recurses deeply and holds no GIL. Beside steps a long one has the time that others
leave: on a CPU the model's own threads want every core, and wait for each other at the end of each
product.
"""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from rayfin.actors.processes.environment import only_when_idle
from rayfin.actors.timing import (
    COMPILE_FULL_SECONDS,
    COMPILE_LATE_SECONDS,
    COMPILE_SHORT_MOST_SECONDS,
    COMPILE_SHORT_SECONDS,
    COMPILE_STARVED_SECONDS,
)

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

STACK_BYTES = 64 << 20  # grammars nest; the process that checks them has a smaller stack
NICE = 5  # of a thread that no step waits for
SHARE = 0.2  # of a core: the longest grammar that a check allows ends within PREPARE_SECONDS

_starting = threading.Lock()  # the size of a stack is a setting of the whole process


class CompileThread(Generic[Made]):
    """Does ``work`` in a thread of its own, which has begun.

    Args:
        first: is called in the thread before.
    """

    def __init__(self, work: Callable[[], Made], first: Callable[[], None] = lambda: None) -> None:
        self._work = work
        self._first = first
        self._results: list[Made] = []
        self._error: BaseException | None = None
        self._clock: int | None = None  # of its processor time
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._thread = threading.Thread(target=self._run, name="compile-grammar")
                self._thread.daemon = True
                self._thread.start()
            finally:
                threading.stack_size(before)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for its end, at most so long; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def only_when_idle(self) -> bool:
        """The thread computes while the processor is idle from now on; False: it cannot."""
        return self._thread.native_id is not None and only_when_idle(self._thread.native_id)

    def processor_seconds(self) -> float:
        """What it has had so far; at its end that, or infinite."""
        if self._clock is None:
            return 0.0  # it has not come to its first line
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return math.inf

    def result(self) -> Made:
        """Waits for its end.

        Raises:
            RuntimeError: ``work`` has raised: the library may panic, which is no Exception.
        """
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            if sys.platform == "linux":  # here: of a thread that has ended it is undefined
                self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._first()
            self._results.append(self._work())
        except BaseException as error:
            self._error = error


class WarmThread(Generic[Made]):
    """Compiles short grammars one after the other, in a thread that has begun.

    A new thread needs memory for its stack. The system maps it only when no other thread of the
    process is amid a fault, and one that computes in idle time may stay there for a whole forward.
    """

    def __init__(self) -> None:
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                self._pool = ThreadPoolExecutor(1, "compile-quick")
                self._pool.submit(int).result()  # it starts with its first task
            finally:
                threading.stack_size(before)

    def begin(self, work: Callable[[], Made]) -> "Task[Made]":
        return Task(self._pool, work)


class Task(Generic[Made]):
    """What a `WarmThread` does."""

    def __init__(self, pool: ThreadPoolExecutor, work: Callable[[], Made]) -> None:
        self._work = work
        self.seconds = 0.0  # of ``work``, at its end
        self._made = pool.submit(self._run)

    def result(self) -> Made:
        """Waits for its end.

        Raises:
            RuntimeError: as ``CompileThread.result``.
        """
        try:
            return self._made.result()
        except BaseException as error:
            raise RuntimeError(str(error)) from error

    def cancel(self) -> None:
        """It is not begun, if it can still be stopped."""
        self._made.cancel()

    def _run(self) -> Made:
        started = time.perf_counter()
        try:
            return self._work()
        finally:
            self.seconds = time.perf_counter() - started


class IdleCompiler(Generic[Made]):
    """Compiles grammars; long ones while the processor is idle.

    One that is short has a share of the processor. A long one that gets less than ``SHARE`` of the
    time begins again in another thread with a share. The first thread is left to end, and while it
    lives, for ``COMPILE_FULL_SECONDS`` at most, long ones keep their share: the machine is full,
    and few threads are left behind. So each compilation is done within a bounded time.
    """

    def __init__(self) -> None:
        self._left: CompileThread[Made] | None = None  # another thread has done its work
        self._full_until = 0.0

    def compile(self, work: Callable[[], Made]) -> Made:
        """Returns what ``work`` makes.

        Raises:
            RuntimeError: it has raised.
        """
        thread = CompileThread(work, _step_back)
        if _ends_soon(thread) or self._is_full():
            return thread.result()
        # It may hold a lock that a step needs: an arena of malloc, or the memory map. Nice 19
        # gives it time sooner, but such a thread keeps the processor for its slice of milliseconds
        # while the threads of a kernel wait for each other. SCHED_IDLE has a share too, of 3 in
        # 1,024: Linux's sched-design-CFS.rst gives this very reason. No thread takes it back
        # without privileges, so that few may be left with it.
        before, began = thread.processor_seconds(), time.monotonic()
        if thread.only_when_idle():
            while not thread.wait(COMPILE_STARVED_SECONDS):
                computed, passed = thread.processor_seconds() - before, time.monotonic() - began
                # One that begins again late would not end within PREPARE_SECONDS.
                share = SHARE if passed < COMPILE_LATE_SECONDS else 2 * SHARE
                if computed < share * passed:
                    self._left, self._full_until = thread, time.monotonic() + COMPILE_FULL_SECONDS
                    return CompileThread(work, _step_back).result()
        return thread.result()

    def _is_full(self) -> bool:
        if self._left is not None and self._left.wait(0):
            self._left = None
        return self._left is not None and time.monotonic() < self._full_until


def _ends_soon(thread: CompileThread[Made]) -> bool:
    """Waits until the thread has ended, or has had the processor for as long as a short one may."""
    until = time.monotonic() + COMPILE_SHORT_MOST_SECONDS
    while not thread.wait(COMPILE_SHORT_SECONDS):
        if thread.processor_seconds() >= COMPILE_SHORT_SECONDS or time.monotonic() >= until:
            return False
    return True


def _step_back() -> None:
    """Lowers the priority of this thread; of a whole process, on other systems, it stays."""
    if sys.platform == "linux":
        try:
            os.nice(NICE)
        except OSError as error:
            logger.debug("a compilation keeps its priority: %s", error)

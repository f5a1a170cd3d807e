"""Threads that compile grammars, beside steps or within one.

Compilation recurses deeply and holds no GIL. Beside steps a long one has the time that others
leave: on a CPU the model's own threads want every core, and wait for each other at the end of each
product.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rayfin.actors.processes.environment import only_when_idle
from rayfin.actors.timing import COMPILE_SHORT_SECONDS, COMPILE_STARVED_SECONDS

logger = logging.getLogger(__name__)

Made = TypeVar("Made")

STACK_BYTES = 64 << 20  # grammars nest; the process that checks them has a smaller stack
NICE = 5  # of a thread that no step waits for

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

    def wait_idly(self, seconds: float) -> bool:
        """As ``wait``; from now on the thread computes while the processor is idle."""
        if self._thread.native_id is not None:
            only_when_idle(self._thread.native_id)
        return self.wait(seconds)

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
            self._first()
            self._results.append(self._work())
        except BaseException as error:
            self._error = error


class IdleCompiler(Generic[Made]):
    """Compiles one grammar after the other; long ones while the processor is idle.

    On a machine that is never idle another thread begins the work again after
    ``COMPILE_STARVED_SECONDS``. So a compilation is done within a bounded time, and takes a share
    of the processor from steps once in so many seconds at most.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._starved: CompileThread[Made] | None = None  # another thread has done its work

    def compile(self, work: Callable[[], Made]) -> Made:
        """Returns what ``work`` makes.

        Raises:
            RuntimeError: it has raised.
        """
        with self._turn:
            if self._starved is None or self._starved.wait(COMPILE_STARVED_SECONDS):
                self._starved = None
                thread = CompileThread(work, _step_back)
                if thread.wait(COMPILE_SHORT_SECONDS):
                    return thread.result()
                if thread.wait_idly(COMPILE_STARVED_SECONDS):
                    return thread.result()
                self._starved = thread
            return CompileThread(work, _step_back).result()


def _step_back() -> None:
    """Lowers the priority of this thread; of a whole process, on other systems, it stays."""
    if sys.platform == "linux":
        try:
            os.nice(NICE)
        except OSError as error:
            logger.debug("a compilation keeps its priority: %s", error)

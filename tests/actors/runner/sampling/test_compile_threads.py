"""Threads that compile: their priorities, and a machine that leaves no time."""

import os
import sys
import threading
import time

import pytest

from rayfin.actors.runner.sampling import compile_threads as module
from rayfin.actors.runner.sampling.compile_threads import CompileThread, IdleCompiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority")


def priority() -> tuple[int, int]:
    """(policy, niceness) of this thread."""
    thread = threading.get_native_id()
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, thread)


def test_a_compilation_within_a_step_has_the_step_s_priority() -> None:
    assert CompileThread(priority).result() == priority()


def test_one_beside_steps_steps_back() -> None:
    before = priority()
    found = IdleCompiler[tuple[int, int]]().compile(priority)
    assert found == (before[0], min(before[1] + module.NICE, 19))
    assert priority() == before


def test_a_long_one_computes_while_the_processor_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_STARVED_SECONDS", 60)

    def work() -> int:
        until = time.monotonic() + 30
        while priority()[0] != os.SCHED_IDLE and time.monotonic() < until:
            time.sleep(0.001)
        return priority()[0]

    assert IdleCompiler[int]().compile(work) == os.SCHED_IDLE
    assert priority()[0] == os.SCHED_OTHER


def test_one_that_gets_no_time_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_SHORT_SECONDS", 0.01)
    monkeypatch.setattr(module, "COMPILE_STARVED_SECONDS", 0.05)
    compiler, free = IdleCompiler[int](), threading.Event()
    tried: list[int] = []

    def work() -> int:
        tried.append(len(tried))
        if tried == [0]:
            free.wait(30)
            time.sleep(0.02)
            return -priority()[0]
        return priority()[0]

    assert compiler.compile(work) == os.SCHED_OTHER  # of the second thread
    assert tried == [0, 1]
    assert compiler.compile(work) == os.SCHED_OTHER  # the first thread is still there
    assert tried == [0, 1, 2] and compiler._starved is not None
    first = compiler._starved
    free.set()
    assert first.result() == -os.SCHED_IDLE
    compiler.compile(work)
    assert compiler._starved is None


def test_an_error_is_the_caller_s() -> None:
    class Panic(BaseException):
        pass

    def work() -> int:
        raise Panic("stack")

    compiler = IdleCompiler[int]()
    for compile in (compiler.compile, lambda work: CompileThread(work).result()):
        with pytest.raises(RuntimeError, match="stack"):
            compile(work)
    assert compiler.compile(lambda: 1) == 1

"""Threads that compile: their priorities, and a machine that leaves no time."""

import os
import sys
import threading

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


def test_one_beside_steps_computes_while_the_processor_is_idle() -> None:
    before = priority()
    assert IdleCompiler[tuple[int, int]]().compile(priority)[0] == os.SCHED_IDLE
    assert priority() == before


def test_one_that_gets_no_time_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_STARVED_SECONDS", 0.05)
    compiler, free = IdleCompiler[int](), threading.Event()
    tried: list[int] = []

    def work() -> int:
        policy, niceness = priority()
        tried.append(policy)
        if policy == os.SCHED_IDLE:
            free.wait(30)
        return niceness

    niceness = min(priority()[1] + module.NICE, 19)
    assert compiler.compile(work) == niceness
    assert tried == [os.SCHED_IDLE, os.SCHED_OTHER]
    assert compiler.compile(work) == niceness  # the first thread is still there
    assert tried[2:] == [os.SCHED_OTHER]
    free.set()
    compiler.compile(work)
    assert tried[3:] == [os.SCHED_IDLE]


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

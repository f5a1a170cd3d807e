"""Threads that compile: their priorities, and a machine that leaves no time."""

import math
import os
import sys
import threading
import time

import pytest

from rayfin.actors.processes.environment import only_when_idle
from rayfin.actors.runner.parts.grammars import compile_threads as module
from rayfin.actors.runner.parts.grammars.compile_threads import CompileThread, IdleCompiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority")


def priority() -> tuple[int, int]:
    """(policy, niceness) of this thread."""
    thread = threading.get_native_id()
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, thread)


def test_a_compilation_within_a_step_has_the_step_s_priority() -> None:
    assert CompileThread(priority).result() == priority()


def test_one_beside_steps_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_SHORT_SECONDS", 60)
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


def test_one_that_gets_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMPILE_SHORT_SECONDS", "COMPILE_STARVED_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)
    judged: list[int] = []

    def seconds(own: object) -> int:  # much more than have passed
        judged.append(len(judged) * 1000)
        return judged[-1]

    monkeypatch.setattr(CompileThread, "processor_seconds", seconds)
    compiler, tried = IdleCompiler[int](), []

    def work() -> int:
        tried.append(1)
        until = time.monotonic() + 30
        while len(judged) < 5 and time.monotonic() < until:
            time.sleep(0.001)
        return priority()[0]

    assert compiler.compile(work) == os.SCHED_IDLE
    assert len(tried) == 1 and len(judged) >= 5 and compiler._left is None


def test_time_is_that_of_the_thread() -> None:
    computed, over = threading.Event(), threading.Event()

    def work() -> float:
        while time.thread_time() < 0.05:
            pass
        computed.set()
        over.wait(30)
        return time.thread_time()

    idle, busy = CompileThread(lambda: over.wait(30)), CompileThread(work)
    assert computed.wait(30)
    assert idle.processor_seconds() < 0.05 <= busy.processor_seconds()
    over.set()
    assert busy.result() < 30 and idle.result()
    assert busy.processor_seconds() >= 0.05  # no error


def test_one_that_gets_no_time_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_SHORT_SECONDS", 0.01)
    monkeypatch.setattr(module, "COMPILE_STARVED_SECONDS", 0.05)
    compiler, free = IdleCompiler[int](), threading.Event()
    tried: list[int] = []
    begun: list[threading.Thread] = []
    set_idle = CompileThread.only_when_idle

    def after_its_begin(own: CompileThread[int]) -> bool:
        until = time.monotonic() + 30
        while own._thread not in begun and time.monotonic() < until:
            time.sleep(0.001)
        return set_idle(own)

    monkeypatch.setattr(CompileThread, "only_when_idle", after_its_begin)

    def work() -> int:
        """Of a thread that gets no time, as it sleeps, the policy's complement."""
        tried.append(number := len(tried))
        begun.append(threading.current_thread())
        if number in (0, 3):
            free.wait(60)
            return ~priority()[0]
        if number == 2:
            time.sleep(0.2)
        return priority()[0]

    assert compiler.compile(work) == os.SCHED_OTHER  # of the second thread
    assert tried == [0, 1]
    first = compiler._left
    assert first is not None
    assert compiler.compile(work) == os.SCHED_OTHER  # it keeps its share
    assert tried == [0, 1, 2] and compiler._left is first
    compiler._full_until = 0.0
    assert compiler.compile(work) == os.SCHED_OTHER  # of a thread that begins again
    assert tried == [0, 1, 2, 3, 4] and compiler._left is not first
    free.set()
    assert first.result() == ~os.SCHED_IDLE


def test_a_short_one_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_SHORT_SECONDS", 60)
    compiler, free = IdleCompiler[bool](), threading.Event()
    compiler._left = CompileThread(lambda: free.wait(60))
    compiler._full_until = math.inf
    waited: list[float | None] = []
    wait = CompileThread.wait

    def noted(own: CompileThread[bool], seconds: float | None = None) -> bool:
        waited.append(seconds)
        return wait(own, seconds)

    monkeypatch.setattr(CompileThread, "wait", noted)
    assert compiler.compile(lambda: True)
    assert waited == [60]
    free.set()


def test_a_system_without_idle_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", denied)
    for name in ("COMPILE_SHORT_SECONDS", "COMPILE_STARVED_SECONDS"):
        monkeypatch.setattr(module, name, 0.001)
    tried = []

    def work() -> int:
        tried.append(1)
        time.sleep(0.1)
        return priority()[0]

    assert IdleCompiler[int]().compile(work) == os.SCHED_OTHER
    assert len(tried) == 1
    assert not only_when_idle()


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

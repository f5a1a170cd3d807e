"""Steps of two threads: in their order, one behind the other on the device, each run once."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rayfin.actors.errors import EngineUnavailable, StepMissing
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.runner.step_turns import StepResultCache, StepTurns


class Device:
    """A runner whose device computes on demand; ``log`` has what happened, in order."""

    def __init__(self, *, queues: bool = True) -> None:
        self.log: list[tuple[str, int]] = []
        self.computed = threading.Semaphore(0)
        self.next_step = (0, 0)
        self.fails: set[int] = set()
        self._queues = queues
        self._queued: list[int] = []
        self._using = threading.Lock()

    def begin(self, info: SchedulerInfo) -> bool:
        assert self._using.acquire(blocking=False)
        queued = self._queues and info.step == self.next_step[1] + len(self._queued)
        if queued:
            self._queued.append(info.step)
            self.log.append(("begin", info.step))
        self._using.release()
        return queued

    def wait(self) -> None:
        if self._queued:
            self.computed.acquire()

    def execute(self, info: SchedulerInfo) -> StepResult:
        assert self._using.acquire(blocking=False), "two threads use the runner"
        try:
            if info.step != self.next_step[1]:
                raise EngineUnavailable("not the next one")
            if info.step in self.fails:
                raise RuntimeError("failed")
            if self._queued:
                assert self._queued.pop(0) == info.step
            self.log.append(("end", info.step))
            self.next_step = (0, info.step + 1)
            return StepResult(0, info.step, np.full((1, 1), info.step, np.int32))
        finally:
            self._using.release()


class Threads:
    """The two threads of an actor."""

    def __init__(self, device: Device, overtaken: float = 20.0) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(2)
        self._results = StepResultCache()
        self._turns = StepTurns(self._results, overtaken)

    def send(self, info: SchedulerInfo) -> "Future[StepResult]":
        return self._pool.submit(self._turns.run, self.device, info, self._execute)  # type: ignore[arg-type]

    def _execute(self, info: SchedulerInfo) -> StepResult:
        result = self.device.execute(info)
        self._results.keep(result)
        return result


@pytest.fixture
def info(step_of: Any) -> Any:
    return lambda step: step_of(epoch=0, step=step)


def until(condition: Any) -> None:
    while not condition():
        threading.Event().wait(0.001)


def test_a_step_is_queued_while_the_one_before_computes(info: Any) -> None:
    threads = Threads(Device())
    answers = [threads.send(info(step)) for step in range(4)]
    until(lambda: len(threads.device.log) == 2)
    assert threads.device.log == [("begin", 0), ("begin", 1)]
    for _ in range(4):
        threads.device.computed.release()
    assert [answer.result(20).step for answer in answers] == [0, 1, 2, 3]
    log = threads.device.log
    assert [step for what, step in log if what == "end"] == [0, 1, 2, 3]
    assert log.index(("begin", 1)) < log.index(("end", 0))


def test_calls_that_overtake_each_other(info: Any) -> None:
    threads = Threads(Device())
    second, first = threads.send(info(1)), threads.send(info(0))
    for _ in range(2):
        threads.device.computed.release()
    assert (first.result(20).step, second.result(20).step) == (0, 1)


def test_steps_that_need_the_host_run_one_after_another(info: Any) -> None:
    threads = Threads(Device(queues=False))
    answers = [threads.send(info(step)) for step in range(6)]
    assert [answer.result(20).step for answer in answers] == list(range(6))
    assert threads.device.log == [("end", step) for step in range(6)]


def test_a_step_that_comes_again_runs_once(info: Any) -> None:
    """While it runs, and when it has run."""
    threads = Threads(Device())
    first, again = threads.send(info(0)), threads.send(info(0))
    threads.device.computed.release()
    assert first.result(20) is again.result(20) is threads.send(info(0)).result(20)
    assert threads.device.log == [("begin", 0), ("end", 0)]


def test_a_step_whose_predecessor_is_lost_has_to_come_again(info: Any) -> None:
    threads = Threads(Device(), overtaken=0.01)
    with pytest.raises(StepMissing, match="step 1 has come, and 0 has not"):
        threads.send(info(1)).result(20)
    threads.device.computed.release(2)
    assert threads.send(info(0)).result(20).step == 0
    assert threads.send(info(1)).result(20).step == 1


def test_a_start_comes_after_the_steps_that_run(info: Any) -> None:
    """An adoption, while the steps of the scheduler before are on the device."""
    threads = Threads(Device())
    answers = [threads.send(info(step)) for step in range(2)]
    until(lambda: len(threads.device.log) == 2)

    def start() -> int:
        with threads._turns.alone():
            return len(threads.device.log)

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start)
        threads.device.computed.release(2)
        assert started.result(20) == 4
    assert [answer.result(20).step for answer in answers] == [0, 1]


def test_a_step_behind_one_that_fails_is_refused(info: Any) -> None:
    threads = Threads(Device(queues=False), overtaken=0.2)
    threads.device.fails.add(0)
    first, second = threads.send(info(0)), threads.send(info(1))
    with pytest.raises(RuntimeError, match="failed"):
        first.result(20)
    with pytest.raises((EngineUnavailable, StepMissing)):
        second.result(20)

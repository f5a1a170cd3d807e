"""Steps by a socket: the scheduler's end against the runner's, without Ray."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import CallLost, EngineUnavailable, Fenced, RunnerGroupFailed, StepMissing
from rayfin.actors.media.part import MediaInput
from rayfin.actors.messages import NewRequest, Sampling, SchedulerInfo, StepResult
from rayfin.actors.scheduler import runner_group as group
from rayfin.actors.scheduler.faults.watchdog import Watchdog
from rayfin.actors.transport.channel import Acceptor
from rayfin.actors.transport.steps import StepLink, StepSocket, open_link

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names without files are Linux's")
PATIENCE = 30.0  # seconds; only a failure waits so long


def step(number: int, **changes: Any) -> SchedulerInfo:
    ones, none = np.ones(1, np.int32), np.zeros(0, np.int32)
    return SchedulerInfo(
        **{
            **dict(epoch=0, step=number, ids=ones, chunk_idx=ones, chunk_len=ones),
            **dict(merge_prompt=ones, kv_len=ones, kv_page_len=ones, last_pos=ones),
            **dict(is_decoding=np.ones(1, np.bool_), decoding_batch=1, prefill_batch=0),
            **dict(new_pages=none, new_pages_len=none),
            **changes,
        }
    )


class Runner:
    """Answers steps as the test says."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.may_run = threading.Event()
        self.may_run.set()
        self.says: dict[int, BaseException] = {}

    def run(self, info: SchedulerInfo) -> StepResult:
        assert self.may_run.wait(PATIENCE)
        self.ran.append(info.step)
        if info.step in self.says:
            raise self.says[info.step]
        return StepResult(info.epoch, info.step, np.array([[info.step]], np.int32))


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def link(runner: Runner) -> Iterator[StepLink]:
    opened = open_link(StepSocket(runner.run).address())
    assert opened is not None
    yield opened
    opened.close()


def test_steps_are_answered_in_order(link: StepLink, runner: Runner) -> None:
    steps = [step(number) for number in range(3)]
    for info in steps:
        link.send(info)
    for info in steps:
        assert link.answer(info, PATIENCE).tokens.tolist() == [[info.step]]
    assert runner.ran == [0, 1, 2]


def test_a_step_that_was_sent_twice_is_answered_once(link: StepLink) -> None:
    for number in (0, 0, 1):
        link.send(step(number))
    assert link.answer(step(0), PATIENCE).step == 0
    assert link.answer(step(1), PATIENCE).step == 1


def test_a_step_that_came_too_early_is_sent_again(link: StepLink, runner: Runner) -> None:
    """Its predecessor is sent again behind it, so its own answer comes first, and is not lost."""
    missing = StepMissing("the step before it has not come")
    runner.says = {1: missing, 2: missing}
    for number in (1, 2):
        link.send(step(number))
    with pytest.raises(CallLost):
        link.answer(step(1), PATIENCE)
    while len(runner.ran) < 2:
        time.sleep(0.01)
    runner.says.clear()
    link.send(step(1))
    assert link.answer(step(1), PATIENCE).tokens == [[1]]
    with pytest.raises(CallLost):
        link.answer(step(2), PATIENCE)
    link.send(step(2))
    assert link.answer(step(2), PATIENCE).tokens == [[2]]


def test_a_step_that_takes_longer_is_waited_for_again(link: StepLink, runner: Runner) -> None:
    runner.may_run.clear()
    link.send(step(0))
    with pytest.raises(TimeoutError):
        link.answer(step(0), 0.01)
    runner.may_run.set()
    assert link.answer(step(0), PATIENCE).step == 0


@pytest.mark.parametrize(
    "said, kind, caused_by_step",
    [
        (ValueError("a bug\nand more"), RunnerGroupFailed, True),
        (EngineUnavailable("not the next one"), RunnerGroupFailed, True),
        (StepMissing("step 1 has come"), CallLost, False),
        (Fenced("a later scheduler's"), Fenced, None),
    ],
    ids=["bug", "refused", "missing", "fenced"],
)
def test_why_a_step_failed(
    link: StepLink, runner: Runner, said: Exception, kind: type, caused_by_step: bool | None
) -> None:
    runner.says = {0: said}
    link.send(step(0))
    with pytest.raises(kind, match=str(said).splitlines()[0]) as caught:
        link.answer(step(0), PATIENCE)
    assert type(caught.value) is kind
    assert getattr(caught.value, "caused_by_step", None) is caused_by_step
    link.send(step(1))  # the link goes on
    assert link.answer(step(1), PATIENCE).step == 1


def test_arrays_in_the_object_store_do_not_go_by_it(link: StepLink) -> None:
    image = MediaInput(b"digest", 0, 1, arrays="a reference")
    assert link.takes(step(0))
    assert link.takes(step(0, new_requests=[NewRequest(0, Sampling(), 9)]))
    assert not link.takes(step(0, new_requests=[NewRequest(0, Sampling(), 9, parts=(image,))]))


def test_a_step_that_cannot_be_packed_is_one_for_ray(link: StepLink) -> None:
    lock: Any = threading.Lock()  # has no pickle
    link.send(step(0, new_requests=[NewRequest(0, lock, 9)]))
    assert link.broken
    with pytest.raises(CallLost):
        link.answer(step(0), PATIENCE)


def test_a_runner_that_has_gone_loses_the_call() -> None:
    gone = open_link(Acceptor(lambda connected: None, "gone").address())
    assert gone is not None
    gone.send(step(0))
    for _ in range(2):
        with pytest.raises(CallLost):
            gone.answer(step(0), PATIENCE)
    assert gone.broken and not gone.takes(step(0))


@pytest.mark.parametrize("address", ["", "rayfin-of-another-machine"])
def test_no_link_to_another_machine(address: str) -> None:
    assert open_link(address) is None


# The group that has such a link


class RayRunner:
    """A runner's handle: steps by Ray are answered at once, and its ref is the answer."""

    def __init__(self, address: str) -> None:
        self.sent: list[int] = []
        self.execute_ahead = self._method(lambda info: self._ahead(info))
        self.listen = self._method(lambda: address)

    def _ahead(self, info: SchedulerInfo) -> StepResult:
        self.sent.append(info.step)
        return StepResult(info.epoch, info.step, np.array([[7]], np.int32))

    def _method(self, call: Callable[..., Any]) -> Any:
        return type("Method", (), {"remote": staticmethod(call)})


def group_of(
    runner: RayRunner, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> group.RunnerGroup:
    monkeypatch.setattr(ray, "get", lambda refs, timeout: refs)
    own = group.RunnerGroup(EngineArgs(**settings), "e")
    own._runners = [runner]
    own._open_link()
    return own


def test_a_group_sends_by_the_link(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    by_ray = RayRunner(StepSocket(runner.run).address())
    own = group_of(by_ray, monkeypatch)
    pending = [own.submit(step(number)) for number in range(2)]
    assert [each.result().tokens.tolist() for each in pending] == [[[0]], [[1]]]
    assert not by_ray.sent


def test_steps_of_a_broken_link_are_sent_again_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    by_ray = RayRunner(Acceptor(lambda connected: None, "gone").address())
    own = group_of(by_ray, monkeypatch)
    pending = [own.submit(step(number)) for number in range(2)]
    assert [each.result().tokens.tolist() for each in pending] == [[[7]], [[7]]]
    own.submit(step(2)).result()
    assert by_ray.sent == [0, 1, 2]


def test_a_hung_step_is_given_up(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "WAIT_SLICE_SECONDS", 0.01)
    monkeypatch.setattr(Watchdog, "patience", lambda *_: 0.0)
    runner.may_run.clear()
    own = group_of(RayRunner(StepSocket(runner.run).address()), monkeypatch)
    with pytest.raises(RunnerGroupFailed, match="hangs"):
        own.submit(step(0)).result()
    runner.may_run.set()


def test_a_gpu_has_no_link(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    own = group_of(RayRunner(StepSocket(runner.run).address()), monkeypatch, device="cuda")
    assert own._link is None

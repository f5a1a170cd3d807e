"""Steps whose calls are lost on their way, with Ray played by a list of what it says."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import Fenced, RunnerGroupFailed, StepMissing
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.runner.actor import Adoption
from rayfin.actors.scheduler import runner_group as group
from rayfin.actors.weights.version import WeightVersion
from rayfin.cache.prefix_index import PageName

LOST = ActorUnavailableError("The actor is temporarily unavailable", None)
GAP = RayTaskError("execute", "", StepMissing("step 1 has come, and 0 has not"))
SLOW = RayTaskError("execute", "", TimeoutError("of the step's own"))
ANSWER = StepResult(0, 0, np.zeros((1, 1), np.int32), seconds=0.01)


class FakeRunner:
    """Counts calls, and is its own method; a ref is the number of its call."""

    def __init__(self) -> None:
        self.sent: list[SchedulerInfo] = []
        self.execute = self
        self.execute_ahead = SimpleNamespace(remote=lambda info: self.ahead.append(info) or 0)
        self.ahead: list[SchedulerInfo] = []

    def remote(self, info: SchedulerInfo) -> int:
        self.sent.append(info)
        return len(self.sent) - 1


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: what Ray says to one call after another -> the pending step and its runner."""

    def make(says: list[Any]) -> tuple[Any, FakeRunner]:
        def get(refs: list[int], timeout: float | None = None) -> Any:
            said = [says[min(ref, len(says) - 1)] for ref in refs]
            for answer in said:
                if isinstance(answer, Exception):
                    raise answer
            return said

        monkeypatch.setattr(group.ray, "get", get)
        own, runner = group.RunnerGroup(EngineArgs(), "e"), FakeRunner()
        own._runners = [runner]
        ones, none = np.ones(1, np.int32), np.zeros(0, np.int32)
        info = SchedulerInfo(
            epoch=0,
            step=0,
            ids=ones,
            chunk_idx=ones,
            chunk_len=ones,
            merge_prompt=ones,
            kv_len=ones,
            kv_page_len=ones,
            last_pos=ones,
            is_decoding=np.ones(1, np.bool_),
            decoding_batch=1,
            prefill_batch=0,
            new_pages=none,
            new_pages_len=none,
        )
        return own.submit(info), runner

    return make


def test_a_lost_call_is_made_again(step: Any) -> None:
    pending, runner = step([LOST, GAP, LOST, ANSWER])
    assert pending.result() is ANSWER
    assert len(runner.sent) == 4
    assert all(info is runner.sent[0] for info in runner.sent)  # the very same step


def test_a_runner_that_nothing_reaches_is_given_up(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "STEP_RESEND_SECONDS", 0.0)
    pending, runner = step([LOST])
    with pytest.raises(RunnerGroupFailed, match="unavailable"):
        pending.result()
    assert len(runner.sent) <= 2


@pytest.mark.parametrize(
    "said, kind, caused_by_step",
    [
        (ActorDiedError(), RunnerGroupFailed, False),
        (RayTaskError("execute", "", ValueError("a bug")), RunnerGroupFailed, True),
        (SLOW.as_instanceof_cause(), RunnerGroupFailed, True),
        (RayTaskError("execute", "", Fenced("a later scheduler's")), Fenced, None),
    ],
    ids=["dead", "a step that raises", "a step that says it is late", "fenced"],
)
def test_what_is_known_to_be_over_is_not_sent_again(
    said: Exception, kind: type, caused_by_step: bool | None, step: Any
) -> None:
    pending, runner = step([said])
    with pytest.raises(kind) as caught:
        pending.result()
    assert len(runner.sent) == 1
    assert getattr(caught.value, "caused_by_step", None) is caused_by_step
    assert not isinstance(caught.value, group.CallLost)


def test_a_call_to_several_ranks_is_not_sent_again(step: Any) -> None:
    pending, runner = step([LOST, ANSWER])
    pending.refs = [1, 0]  # one has it, and may wait in a later step for the other one
    with pytest.raises(group.CallLost):
        pending.result()
    assert len(runner.sent) == 1


def test_a_gpu_gets_steps_ahead(step: Any) -> None:
    pending, runner = step([ANSWER])
    assert (len(runner.sent), len(runner.ahead)) == (1, 0)
    pending.group._args = EngineArgs(device="cuda")
    pending.group.send(pending.info)
    assert (len(runner.sent), len(runner.ahead)) == (1, 1)


def test_a_lost_ping_is_no_death(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pending, _ = step([LOST, ActorDiedError()])
    monkeypatch.setattr(group.ray, "wait", lambda refs, num_returns, timeout: (refs, []))
    assert pending.group.alive([0]) is True
    assert pending.group.alive([1]) is False


# Grammars that are compiled ahead.


class FakeRanks:
    """Runners that hold the grammars which they were sent; a ref is its own call."""

    def __init__(self, count: int) -> None:
        self.sent: list[tuple[int, list[str]]] = []
        self.answers: list[Future[str | None]] = []
        self.runners = [self._rank(rank) for rank in range(count)]

    def _rank(self, rank: int) -> Any:
        def remote(grammars: list[str]) -> Any:
            self.sent.append((rank, grammars))
            self.answers.append(answer := Future())
            return SimpleNamespace(future=lambda: answer)

        return SimpleNamespace(prepare=SimpleNamespace(remote=remote))


def test_all_ranks_compile() -> None:
    woken: list[bool] = []
    own = group.RunnerGroup(EngineArgs(), "e", on_prepared=lambda: woken.append(pending.done()))
    ranks = FakeRanks(2)
    own._runners = ranks.runners
    pending = own.prepare(["one", "two"])
    assert ranks.sent == [(0, ["one", "two"]), (1, ["one", "two"])]
    assert not pending.done()
    ranks.answers[1].set_result(None)
    assert not pending.done()
    ranks.answers[0].set_result(None)
    assert pending.done() and pending.error() is None
    assert woken == [False, True]


def test_the_error_of_any_rank_counts() -> None:
    own, ranks = group.RunnerGroup(EngineArgs(), "e"), FakeRanks(3)
    own._runners = ranks.runners
    pending = own.prepare(["bad"])
    for answer, says in zip(ranks.answers, (None, "no", "no"), strict=True):
        answer.set_result(says)
    assert pending.done() and pending.error() == "no"


@pytest.mark.parametrize("says", [ActorDiedError(), LOST, RayTaskError("prepare", "", KeyError())])
def test_a_rank_that_cannot_answer_holds_nothing_back(says: Exception) -> None:
    own, ranks = group.RunnerGroup(EngineArgs(), "e"), FakeRanks(1)
    own._runners = ranks.runners
    pending = own.prepare(["one"])
    ranks.answers[0].set_exception(says)
    assert pending.done() and pending.error() is None


def test_without_runners_nothing_is_waited_for() -> None:
    pending = group.RunnerGroup(EngineArgs(), "e").prepare(["one"])
    assert pending.done() and pending.error() is None


# The lease of ranks that wait for each other.


@pytest.mark.parametrize(("ranks", "expected"), [(1, []), (2, [0, 1, 0, 0])])
def test_ranks_that_wait_for_others_are_pinged(
    monkeypatch: pytest.MonkeyPatch, ranks: int, expected: list[int]
) -> None:
    """Each as often as it answers; rank 1 is busy and answers none."""
    pinged: list[int] = []

    def ping(rank: int) -> Any:
        return SimpleNamespace(ping=SimpleNamespace(remote=lambda: pinged.append(rank) or rank))

    own = group.RunnerGroup(EngineArgs(), "e")
    own._runners = [ping(rank) for rank in range(ranks)]
    monkeypatch.setattr(
        group.ray, "wait", lambda refs, timeout: ([], refs) if refs == [1] else (refs, [])
    )
    slices = 0

    def get(seconds: float) -> list[str]:
        nonlocal slices
        slices += 1
        if slices < 4:
            raise TimeoutError
        return ["started"]

    assert own.hear(get, 60.0, "starting") == ["started"]
    assert pinged == expected


def test_names_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may have run a step that another has not."""
    own = group.RunnerGroup(EngineArgs(), "e")
    a, b, c, x = (PageName(word, b"") for word in (b"a", b"b", b"c", b"x"))
    names = [{0: a, 1: b, 2: c}, {0: a, 1: x}]
    answers: list[Any] = [Adoption("config", 1, WeightVersion(), named) for named in names]  # type: ignore[arg-type]
    monkeypatch.setattr(own, "_find_runners", lambda: setattr(own, "_runners", own._names))
    monkeypatch.setattr(own, "_on_all", lambda method, *arguments: method)
    monkeypatch.setattr(own, "wait", lambda asked, *_: answers if asked == "adopt" else [])
    assert own._adopt() is answers[0]
    assert own.names == {0: a}


def test_adopted_runners_that_cannot_turn_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler died amid new weights, of a model that only new runners load."""
    own, called = group.RunnerGroup(EngineArgs(), "e"), list[str]()
    own.version = WeightVersion(1, "step-1", "d1", "/nowhere")

    def start_new(patience: float) -> Any:
        called.append("new")
        return own._config

    def turn() -> None:
        raise RunnerGroupFailed("the weights of this model cannot be replaced where they are")

    adopted = Adoption("config", 1 << 32, WeightVersion())  # type: ignore[arg-type]
    monkeypatch.setattr(own, "_adopt", lambda: adopted)
    monkeypatch.setattr(own, "_turn", turn)
    monkeypatch.setattr(own, "stop", lambda: called.append("stop"))
    monkeypatch.setattr(own, "_start_new", start_new)
    assert own.start() == "config" and called == ["stop", "new"]

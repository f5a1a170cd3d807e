"""Spare runners: made, looked after, taken over; their processes are fakes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rayfin.actors import timing
from rayfin.actors.processes.identity import Process
from rayfin.actors.runner.spare import RunnerState, SparePlan
from rayfin.actors.scheduler.faults import spare_runners as room
from rayfin.actors.scheduler.faults.spare_runners import SpareRunners


class Calls:
    """Processes that answer when they are let to."""

    def __init__(self) -> None:
        self.count = 1  # spares that the runner allows
        self.busy: set[str] = set()  # names that dead processes have still
        self.made: list[str] = []
        self.ended: list[str] = []
        self.warmed: dict[str, Future[None]] = {}
        self.pings: dict[str, Future[RunnerState]] = {}
        self.plans = 0

    def plan(self) -> Future[SparePlan] | None:
        self.plans += 1
        answer: Future[SparePlan] = Future()
        answer.set_result(SparePlan(self.count, ("json",)))
        return answer

    def make(self, name: str) -> str | None:
        if name in self.busy:
            return None
        self.made.append(name)
        return f"{name}#{len(self.made)}"

    def warm(self, runner: str, plan: SparePlan) -> Future[None]:
        assert plan.modules == ("json",)
        self.warmed[runner] = Future()
        return self.warmed[runner]

    def ping(self, runner: str) -> Future[RunnerState]:
        self.pings[runner] = Future()
        return self.pings[runner]

    def end(self, runner: str, process: Process | None) -> None:
        self.ended.append(runner)

    def answers(self, runner: str) -> None:
        number = int(runner.partition("#")[2])
        self.pings[runner].set_result(RunnerState(Process("node", number, 1), serves=False))

    def is_ready(self, runner: str) -> None:
        self.answers(runner)
        self.warmed[runner].set_result(None)


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """Spares with their fakes; ``pass_time`` takes turns."""

    def __init__(self, names: int = 2) -> None:
        self.calls, self.clock = Calls(), Time()
        self.spares = SpareRunners([f"r{n}" for n in range(names)], self.calls, self.clock)

    def pass_time(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.5
            self.spares.turn()


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def ready(scene: Scene) -> Scene:
    scene.pass_time(1)
    scene.calls.is_ready("r1#1")
    scene.pass_time(1)
    assert scene.spares.num_ready == 1
    return scene


def test_one_is_made_when_the_runner_has_served_for_a_while(scene: Scene) -> None:
    scene.spares.rest()
    scene.pass_time(timing.SPARE_CALM_SECONDS - 1)
    assert scene.calls.made == []
    scene.pass_time(2)
    assert scene.calls.made == ["r1"]
    scene.pass_time(20)
    assert scene.calls.made == ["r1"]


def test_it_is_ready_when_it_has_imported_all(scene: Scene) -> None:
    scene.pass_time(1)
    scene.calls.answers("r1#1")
    scene.pass_time(1)
    assert scene.spares.num_ready == 0
    scene.calls.warmed["r1#1"].set_result(None)
    assert scene.spares.num_ready == 1


def test_it_takes_over_with_its_name_and_the_next_one_gets_the_dead_runners(ready: Scene) -> None:
    taken = ready.spares.take()
    assert taken is not None and (taken.name, taken.runner) == ("r1", "r1#1")
    assert taken.process == Process("node", 1, 1)
    assert ready.spares.serving == "r1"
    assert (ready.spares.take(), ready.spares.num_ready) == (None, 0)
    ready.calls.busy = {"r0"}  # Ray has not seen its death yet
    ready.pass_time(3)
    assert ready.calls.made == ["r1"]
    ready.calls.busy.clear()
    ready.pass_time(1)
    assert ready.calls.made == ["r1", "r0"]
    assert ready.calls.ended == []


def test_one_that_still_imports_is_better_than_a_new_process(scene: Scene) -> None:
    scene.pass_time(1)
    assert scene.spares.take() is None  # its process may not have started
    scene.calls.answers("r1#1")
    scene.pass_time(1)
    taken = scene.spares.take()
    assert taken is not None and not taken.is_ready


def test_a_ready_one_is_better() -> None:
    scene = Scene(3)
    scene.calls.count = 2
    scene.pass_time(2)
    assert scene.calls.made == ["r1", "r2"]
    scene.calls.answers("r1#1")
    scene.calls.is_ready("r2#2")
    scene.pass_time(1)
    taken = scene.spares.take()
    assert taken is not None and taken.name == "r2"


def test_one_that_has_taken_over_is_not_looked_after(ready: Scene) -> None:
    ready.spares.take()
    ready.calls.count = 0
    ready.pass_time(100)
    assert ready.calls.ended == []


def test_a_dead_one_is_made_again(ready: Scene) -> None:
    ready.pass_time(timing.RUNNER_PING_SECONDS)
    ready.calls.pings["r1#1"].set_exception(RuntimeError("it was killed"))
    ready.pass_time(1)
    assert (ready.calls.ended, ready.spares.num_ready) == (["r1#1"], 0)
    ready.pass_time(timing.SPARE_CALM_SECONDS + 1)
    assert ready.calls.made == ["r1", "r1"]


def test_one_that_falls_silent_is_made_again(ready: Scene) -> None:
    ready.pass_time(timing.RUNNER_PING_SECONDS + timing.PING_PATIENCE_SECONDS - 2)
    assert ready.calls.ended == []
    ready.pass_time(4)
    assert ready.calls.ended == ["r1#1"]


def test_a_process_may_take_longer_to_start_than_to_answer(scene: Scene) -> None:
    scene.pass_time(timing.RUNNER_PROCESS_SECONDS - 1)
    assert scene.calls.ended == []
    scene.pass_time(2)
    assert scene.calls.ended == ["r1#1"]


def test_imports_that_hang_are_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SPARE_WARM_SECONDS", 5.0)
    scene.pass_time(1)
    scene.calls.answers("r1#1")
    scene.pass_time(3)
    assert scene.calls.ended == []
    scene.calls.answers("r1#1")
    scene.pass_time(2)
    assert scene.calls.ended == ["r1#1"]


def test_those_that_die_of_their_imports_are_made_ever_more_rarely(scene: Scene) -> None:
    times: list[float] = []
    scene.pass_time(1)
    while len(times) < 6:
        scene.calls.warmed[f"r1#{len(times) + 1}"].set_exception(MemoryError("no room"))
        while len(scene.calls.made) < len(times) + 2:
            scene.pass_time(0.5)
        times.append(scene.clock.now)
    pauses = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert pauses[0] < pauses[1] < pauses[2] <= timing.MAX_RESTART_PAUSE_SECONDS + 2
    assert pauses[-1] == pytest.approx(pauses[-2])


def test_where_memory_is_short_none_is_made_until_there_is_some(scene: Scene) -> None:
    scene.calls.count = 0
    scene.pass_time(timing.MAX_RESTART_PAUSE_SECONDS * 2)
    assert scene.calls.made == []
    assert scene.calls.plans <= 3  # the runner is not asked all the time
    scene.calls.count = 1
    scene.pass_time(timing.MAX_RESTART_PAUSE_SECONDS + 1)
    assert scene.calls.made == ["r1"]


@pytest.mark.parametrize("fails", [RuntimeError("the runner has died"), None], ids=["dies", "none"])
def test_without_a_runners_word_none_is_made(
    fails: Exception | None, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan() -> Any:
        if fails is None:
            return None
        answer: Future[SparePlan] = Future()
        answer.set_exception(fails)
        return answer

    asks: Callable[[], Any] = scene.calls.plan
    monkeypatch.setattr(scene.calls, "plan", plan)
    scene.pass_time(5)
    assert scene.calls.made == []
    monkeypatch.setattr(scene.calls, "plan", asks)
    scene.pass_time(1)
    assert scene.calls.made == ["r1"]


def test_an_engine_that_ends_ends_its_spares(ready: Scene) -> None:
    ready.spares.close()
    assert ready.calls.ended == ["r1#1"]
    ready.pass_time(100)
    assert ready.calls.made == ["r1"]


def test_an_engine_of_one_name_has_none() -> None:
    scene = Scene(1)
    scene.pass_time(10)
    assert (scene.calls.plans, scene.calls.made, scene.spares.take()) == (0, [], None)

"""Idle runners: pinged, and found dead before a request finds them so."""

import pytest

from rayfin.actors.scheduler.faults import runner_pinger as keeper
from rayfin.actors.scheduler.faults.runner_pinger import RunnerPinger


class Runners:
    epoch = 0
    waits = False

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)

    def ping(self) -> object:
        return object()

    def alive(self, ping: object) -> bool | None:
        return self.answers.pop(0)


class Engine:
    has_work = False


class Time:
    """A clock that sleeping moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(keeper, "time", clock)
    return clock


def deaths(runners: Runners, engine: Engine) -> list[str]:
    reasons: list[str] = []
    RunnerPinger(runners, engine, reasons.append).ping_once()
    return reasons


def test_answer_is_no_news(clock: Time) -> None:
    assert deaths(Runners(None, None, True), Engine()) == []


def test_who_loads_or_takes_new_weights_does_not_hang(clock: Time) -> None:
    runners = Runners(*[None] * 100, True)
    runners.waits = True
    assert deaths(runners, Engine()) == [] and clock.now > keeper.PING_PATIENCE_SECONDS


def test_death_is_told(clock: Time) -> None:
    assert deaths(Runners(None, False), Engine()) == ["the idle runner has died"]


def test_idle_runner_that_does_not_answer_is_hung(clock: Time) -> None:
    assert deaths(Runners(*[None] * 100), Engine()) == ["the idle runner hangs"]
    assert clock.now > keeper.PING_PATIENCE_SECONDS


def test_busy_runner_may_take_its_time(clock: Time) -> None:
    engine = Engine()
    engine.has_work = True
    assert deaths(Runners(*[None] * 100, True), engine) == []


def test_busy_engine_finds_a_death_by_itself(clock: Time) -> None:
    engine, runners = Engine(), Runners(*[False] * 10)
    engine.has_work = True
    runners.alive = lambda ping: setattr(runners, "epoch", 1)  # type: ignore[assignment,func-returns-value]
    assert deaths(runners, engine) == []

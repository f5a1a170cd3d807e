"""What of a step's time counts as its way, by a clock that the test moves."""

import pytest

from harness import make_harness
from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import StepResult
from rayfin.actors.metric import ITL_BOUNDS, Histogram
from rayfin.actors.scheduler.step_pipeline import StepOverheadTimer


class Pending:
    """A step whose result comes at the time ``at``, or is there."""

    def __init__(self, clock: list[float], at: float, seconds: float) -> None:
        self._clock, self._at, self._seconds = clock, at, seconds

    def result(self) -> StepResult:
        self._clock[0] = max(self._clock[0], self._at)
        if self._seconds < 0:
            raise RunnerGroupFailed("it has died")
        return StepResult(0, 0, None, seconds=self._seconds)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


@pytest.fixture
def seconds() -> Histogram:
    return Histogram(ITL_BOUNDS)


@pytest.fixture
def transport(clock: list[float], seconds: Histogram) -> StepOverheadTimer:
    return StepOverheadTimer(lambda: clock[0], seconds)


def test_one_step_at_a_time(
    transport: StepOverheadTimer, clock: list[float], seconds: Histogram
) -> None:
    transport.sent()
    transport.result(Pending(clock, 103.0, 2.5))
    assert seconds.sum == 0.5
    clock[0] = 110.0
    transport.sent()
    transport.result(Pending(clock, 111.0, 0.25))
    assert seconds.sum == 0.5 + 0.75 and seconds.count == 2


def test_the_step_before_hides_it(
    transport: StepOverheadTimer, clock: list[float], seconds: Histogram
) -> None:
    for _ in range(2):
        transport.sent()
    transport.result(Pending(clock, 103.0, 2.5))
    transport.result(Pending(clock, 105.5, 2.5))  # it ran from when the other was done
    assert seconds.sum == 0.5


def test_a_scheduler_that_comes_late_has_waited_for_nothing(
    transport: StepOverheadTimer, clock: list[float], seconds: Histogram
) -> None:
    transport.sent()
    clock[0] = 120.0  # it was busy
    transport.result(Pending(clock, 103.0, 1.0))
    assert seconds.sum == 0 and seconds.count == 1


def test_steps_that_are_lost_are_forgotten(
    transport: StepOverheadTimer, clock: list[float], seconds: Histogram
) -> None:
    for _ in range(2):
        transport.sent()
    with pytest.raises(RunnerGroupFailed):
        transport.result(Pending(clock, 103.0, -1.0))
    transport.reset()
    transport.sent()
    transport.result(Pending(clock, 105.0, 1.5))
    assert seconds.sum == 0.5 and seconds.count == 1


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_engine_observes_each_step(steps_in_flight: int) -> None:
    h = make_harness(step_seconds=0.5, steps_in_flight=steps_in_flight)
    h.add(4, 6)
    h.run()
    found = h.engine.stats().histograms["step_transport_seconds"]
    assert found.count == h.engine.stats().steps and found.sum == 0

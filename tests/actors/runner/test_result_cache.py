"""A step that comes again is answered again, and not run again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rayfin.actors.errors import StepMissing
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.runner.step_turns import StepResultCache


@pytest.fixture
def info(step_of: Callable[..., SchedulerInfo]) -> Callable[[int, int], SchedulerInfo]:
    return lambda epoch, step: step_of(epoch=epoch, step=step)


def result(epoch: int, step: int) -> StepResult:
    return StepResult(epoch, step, np.zeros((0, 1), np.int32))


def test_a_step_is_answered_as_before(info: Any) -> None:
    answers = StepResultCache(kept=2)
    given = [result(3, step) for step in range(3)]
    for step, own in enumerate(given):
        assert answers.find(info(3, step), (3, step)) is None
        answers.keep(own)
    assert answers.find(info(3, 2), (3, 3)) is given[2]
    assert answers.find(info(3, 1), (3, 3)) is given[1]
    assert answers.find(info(3, 0), (3, 3)) is None  # forgotten: the runner itself refuses it


def test_a_step_before_its_turn_has_to_come_again(info: Any) -> None:
    answers = StepResultCache()
    with pytest.raises(StepMissing, match="step 1 has come, and 0 has not"):
        answers.find(info(3, 1), (3, 0))
    answers.keep(result(3, 0))
    assert answers.find(info(3, 1), (3, 1)) is None
    with pytest.raises(StepMissing):
        answers.find(info(3, 2), (3, 1))


def test_other_epochs_are_the_runners_to_refuse(info: Any) -> None:
    answers = StepResultCache()
    answers.keep(result(3, 0))
    assert answers.find(info(3, 0), (4, 0)) is None
    assert answers.find(info(3, 7), (4, 0)) is None
    assert answers.find(info(4, 0), (4, 0)) is None
    answers.keep(result(4, 0))
    assert answers.find(info(3, 0), (4, 1)) is None

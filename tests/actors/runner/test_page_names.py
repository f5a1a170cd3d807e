"""A page has its name only while it holds what the name says; a new scheduler goes by it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import (
    COPY,
    STATE_SAVE,
    SWAP_IN,
    SWAP_OUT,
    SchedulerInfo,
    StepResult,
)
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.scheduler.engine import Engine
from rayfin.cache.prefix_index import NameChanges, PageName

Make = Callable[..., Any]
SIZE = 4


def name(number: int) -> PageName:
    return PageName(bytes([number]) * 32, np.full(SIZE, number, np.int32).tobytes())


class Steps:
    """Names of a runner whose slot s has pages 4 s, 4 s + 1, ..."""

    def __init__(self, step_of: Make, row: Make, steps_in_flight: int = 2) -> None:
        self.names = PageNames()
        self.names.start(np.arange(16, dtype=np.int32).reshape(4, 4), SIZE, steps_in_flight)
        self._step_of, self._row, self._step = step_of, row, 0

    def begin(
        self, slot: int, kv_len: int = 0, held: int = 1, dropped: tuple[int, ...] = (), **more: Any
    ) -> SchedulerInfo:
        named = {page: name(number) for page, number in more.pop("named", {}).items()}
        info: SchedulerInfo = self._step_of(
            self._row(slot, [1] * SIZE, kv_len=kv_len, held=held), step=self._step
        )
        info = replace(info, names=NameChanges(named, list(dropped)), **more)
        self._step += 1
        self.names.moving(info.moves)
        self.names.before(info)
        return info

    def end(self, info: SchedulerInfo, *, fails: bool = False) -> None:
        errors = {0: RequestFailed("planted")} if fails else {}
        self.names.after(info, StepResult(0, info.step, np.zeros((1, 1), np.int32), errors))

    def run(self, *args: Any, fails: bool = False, **more: Any) -> None:
        self.end(self.begin(*args, **more), fails=fails)

    @property
    def known(self) -> dict[int, int]:
        return {page: own.page_hash[0] for page, own in self.names.all().items()}


@pytest.fixture
def steps(step_of: Make, row: Make) -> Steps:
    return Steps(step_of, row)


def test_a_name_comes_behind_its_step(steps: Steps) -> None:
    info = steps.begin(0, named={0: 1, 5: 2})
    assert steps.known == {}
    steps.end(info)
    assert steps.known == {0: 1, 5: 2}


def test_it_goes_before_a_step_writes(steps: Steps) -> None:
    steps.run(3, named={page: page for page in range(8)})
    steps.begin(1, kv_len=6, held=3)  # pages 5 and 6 of its table 4, 5, 6, 7
    assert sorted(steps.known) == [0, 1, 2, 3, 4, 7]


def test_moves_write_too(steps: Steps) -> None:
    steps.run(3, named={page: page for page in range(6)})
    moves = np.array([[COPY, 0, 1], [SWAP_OUT, 2, 3], [SWAP_IN, 4, 5]], np.int32)
    steps.run(2, moves=moves)
    assert sorted(steps.known) == [0, 2, 3, 4]


def test_names_go_before_moves_begin(
    served: Make, tiny_model: Make, step_of: Make, row: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may copy a page and look at its name while the move writes there."""
    runner = served(tiny_model("llama").folder).runner
    runner.names._know({page: name(page) for page in range(3)})

    def move(moves: Any) -> None:
        assert [*runner.names.all()] == [0, 2]
        raise InterruptedError

    monkeypatch.setattr(runner._mover, "run", move)
    moves = np.array([[COPY, 0, 1]], np.int32)
    with pytest.raises(InterruptedError):
        runner.execute(
            replace(step_of(row(0, [1], held=1)), moves=moves, epoch=runner.next_step[0])
        )


def test_what_the_scheduler_drops(steps: Steps) -> None:
    steps.run(3, named={0: 1, 1: 2})
    steps.run(3, dropped=(1, 7))
    assert steps.known == {0: 1}


def test_a_step_that_is_queued_writes_behind_the_one_before(steps: Steps) -> None:
    """On a GPU it begins before the other has ended."""
    first = steps.begin(3, named={4: 1, 0: 2})
    second = steps.begin(1, named={0: 3})
    steps.end(first)
    assert steps.known == {}
    steps.end(second)
    assert steps.known == {0: 3}


def test_another_thread_writes(steps: Steps) -> None:
    steps.run(3, named={0: 1, 1: 2})
    steps.names.overwritten(np.array([1], np.int32))
    assert steps.known == {0: 1}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_behind_a_row_that_failed(step_of: Make, row: Make, steps_in_flight: int) -> None:
    """Steps that were sent before the scheduler knew of it may stand on what was not written."""
    steps = Steps(step_of, row, steps_in_flight)
    steps.run(3, named={0: 1})
    steps.run(3, named={1: 2}, fails=True)
    for number in range(1, steps_in_flight):
        steps.run(3, named={4 + number: 3})
    assert steps.known == {0: 1}
    steps.run(3, named={2: 4})
    assert steps.known == {0: 1, 2: 4}


def save(steps: Steps, states: dict[int, bytes], moved: tuple[int, ...], **more: Any) -> None:
    moves = np.array([[STATE_SAVE, 0, snapshot] for snapshot in moved], np.int32).reshape(-1, 3)
    steps.run(3, moves=moves, states=states, **more)


def test_states_have_names_too(steps: Steps) -> None:
    """Only those that a move saves: one may have been taken back, with the request."""
    save(steps, {0: b"a", 1: b"b"}, (0,))
    assert steps.names.find_state(b"a") == (0,) and steps.names.find_state(b"b") is None
    save(steps, {0: b"c"}, (0,))
    assert steps.names.find_state(b"a") is None and steps.names.find_state(b"c") == (0,)
    steps.names.moving(np.array([[STATE_SAVE, 0, 0]], np.int32))
    assert steps.names.find_state(b"c") is None


def test_no_state_counts_behind_a_row_that_failed(steps: Steps) -> None:
    save(steps, {0: b"a"}, (0,))
    save(steps, {1: b"b"}, (1,), fails=True)
    save(steps, {2: b"c"}, (2,))
    assert [steps.names.find_state(own) for own in (b"a", b"b", b"c")] == [None] * 3
    save(steps, {2: b"c"}, (2,))
    steps.names.turn()
    assert steps.names.find_state(b"c") is None


def test_a_new_start_and_new_weights(steps: Steps) -> None:
    steps.run(3, named={0: 1})
    steps.begin(3, named={1: 2})
    steps.names.start(np.zeros((4, 4), np.int32), SIZE, 2)
    assert steps.known == {0: 1}, "the step had no end"
    steps.names.turn()
    assert steps.known == {}


PROMPT = [5, 9, 3, 100, 7, 7, 60, 2, 44, 31, 8, 17, 90]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'},
        {"kv_cache_dtype": "bfloat16", "max_lease": 4},
    ],
)
def test_the_next_scheduler(
    settings: dict[str, Any], tiny_model: Make, served: Make, request_of: Make
) -> None:
    """A start anew keeps the pages, those at the front too; only the last token is computed."""
    engine = served(tiny_model("llama").folder, **settings)
    output = engine.run(request_of(0, PROMPT, 16))[0]
    names = engine.runner.names.all()
    assert len(names) >= 5
    executor = InlineExecutor(engine.runner, engine.config)
    engine.engine = Engine(engine.config, executor)
    engine.engine.lifecycle.state.tables.restore(names)
    executor.submit, engine._submit = engine._record_keys, executor.submit
    again = engine.run(request_of(1, PROMPT, 16), request_of(2, PROMPT + output[:7], 9))
    assert again == {1: output, 2: output[7:]}
    assert (engine.cached[1], engine.cached[2]) == (12, 16)


@pytest.mark.parametrize("change", ["sleep", "reload"])
def test_pages_that_are_gone(change: str, tiny_model: Make, served: Make, request_of: Make) -> None:
    engine = served(tiny_model("llama").folder)
    engine.run(request_of(0, PROMPT, 9))
    assert engine.runner.names.all()
    if change == "sleep":
        engine.runner.sleep()
    else:
        engine.runner.reload(engine.executor._version)
        engine.runner.start(engine.config, 1)
    assert not engine.runner.names.all()


def test_names_that_come_alone(steps: Steps) -> None:
    """They count while no later step has begun, which may write there; what is dropped, always."""
    steps.run(0, named={0: 1})
    changes = NameChanges({5: name(2)}, [])
    steps.names.add(changes, (0, 0))
    assert steps.known == {0: 1, 5: 2}
    steps.begin(1, kv_len=SIZE, held=2)  # page 5 is written
    steps.names.add(NameChanges({5: name(2), 9: name(3)}, [0]), (0, 0))
    assert steps.known == {}


def test_names_that_come_alone_after_a_failure(steps: Steps) -> None:
    steps.run(0, fails=True)
    steps.names.add(NameChanges({5: name(2)}, []), (0, 0))
    assert steps.known == {}


def test_a_page_may_lose_its_name_after_another_page_has_had_it(steps: Steps) -> None:
    steps.run(0, named={0: 1})
    steps.run(1, named={5: 1})
    steps.run(2, dropped=[5])
    steps.names.add(NameChanges({}, [0]), (0, 1))  # late
    assert steps.known == {}

"""Moves wait for a step with rows, go out once and in order, and die with the runners."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rayfin.actors.messages import COPY, SWAP_IN, SWAP_OUT
from rayfin.actors.scheduler.runner_diff import PageMoves

Make = Callable[..., Any]


def test_order_is_kept() -> None:
    moves = PageMoves()
    moves.add(SWAP_OUT, [5, 4], [0, 1])
    moves.add(SWAP_IN, [1], [9])
    moves.add(COPY, [], [])
    assert len(moves) == 3
    taken = moves.drain()
    assert taken.dtype == np.int32
    assert taken.tolist() == [[SWAP_OUT, 5, 0], [SWAP_OUT, 4, 1], [SWAP_IN, 1, 9]]
    assert moves.drain().shape == (0, 3)


def test_every_source_has_a_target() -> None:
    with pytest.raises(ValueError):
        PageMoves().add(COPY, [1, 2], [3])


def test_moves_go_with_the_next_step(harness: Make) -> None:
    """An idle engine sends nothing; the next step carries them, the one after does not."""
    h = harness(num_host_pages=4, steps_in_flight=1)
    h.add(5, 3)
    h.step()
    held = h.engine.lifecycle.state.tables.pages_since(0, 0)
    h.engine.lifecycle.state.moves.add(SWAP_OUT, held, [3, 0])
    h.run()
    h.check()
    assert [step.moves.tolist() for step in h.executor.log] == [
        [],
        [[SWAP_OUT, held[0], 3], [SWAP_OUT, held[1], 0]],
        [],
    ]


def test_moves_wait_while_there_is_no_step(harness: Make) -> None:
    h = harness(num_host_pages=4)
    h.add(5, 1)
    h.run()
    h.engine.lifecycle.state.moves.add(SWAP_OUT, [1], [0])
    assert h.engine.step() == {} and len(h.engine.lifecycle.state.moves) == 1


def test_restart_drops_moves(harness: Make) -> None:
    h = harness(num_host_pages=4)
    h.add(5, 3)
    h.executor.fail_at = {1}
    h.step()
    h.engine.lifecycle.state.moves.add(SWAP_OUT, [0], [0])
    h.run()
    h.check()
    assert h.executor.epoch == 1
    assert not any(len(step.moves) for step in h.executor.log)


@pytest.mark.parametrize(
    "move, why",
    [
        ((SWAP_OUT, 7, 0), "holds nothing"),
        ((SWAP_IN, 0, 9), "holds nothing"),
        ((COPY, 0, 1), "onto one that is held"),
        ((COPY, 0, -1), None),
        ((3, 0, 1), None),
    ],
)
def test_fake_runner_finds(harness: Make, move: tuple[int, int, int], why: str | None) -> None:
    """The oracle's own test: an illegal move does not pass."""
    h = harness(num_host_pages=4, steps_in_flight=1)
    h.add(5, 6)
    h.add(5, 6)
    h.step()
    kind, source, target = move
    h.engine.lifecycle.state.moves.add(kind, [source], [target])
    with pytest.raises(AssertionError, match=why):
        h.step()


def test_fake_runner_reads_a_host_page_once(harness: Make) -> None:
    h = harness(num_host_pages=4, steps_in_flight=1)
    h.add(5, 6)
    h.step()
    moves = h.engine.lifecycle.state.moves
    moves.add(SWAP_OUT, [0], [2])
    moves.add(SWAP_IN, [2], [20])
    h.step()
    moves.add(SWAP_IN, [2], [21])
    with pytest.raises(AssertionError, match="holds nothing"):
        h.step()


def test_failed_submit_loses_no_request(harness: Make) -> None:
    """The step that carried moves never arrived: nothing on the new runners depends on them."""
    h = harness(num_host_pages=4)
    h.add(5, 6)
    h.step()
    h.engine.lifecycle.state.moves.add(SWAP_OUT, [0], [0])
    h.executor.fail_submit_at = {h.executor.num_submitted}
    h.run()
    h.check()
    assert h.executor.epoch == 1
    assert not any(len(step.moves) for step in h.executor.log)

"""A slot that is freed and used again between two steps is sent once, and rightly."""

from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.scheduler.runner_diff import RunnerDiff


def _new(handle: int, seed: int = 0) -> NewRequest:
    return NewRequest(handle, Sampling(seed=seed), 9)


def test_in_the_order_of_the_rows() -> None:
    runner_diff = RunnerDiff()
    for handle in (1, 2, 3):
        runner_diff.enter(_new(handle))
    assert 2 in runner_diff
    new, forgotten = runner_diff.drain([3, 1, 2])
    assert [own.handle for own in new] == [3, 1, 2] and forgotten == []
    assert 2 not in runner_diff and runner_diff.drain([1, 2, 3]) == ([], [])


def test_what_has_no_row_yet_waits() -> None:
    runner_diff = RunnerDiff()
    runner_diff.enter(_new(4))
    assert runner_diff.drain([7]) == ([], [])
    assert [own.handle for own in runner_diff.drain([4])[0]] == [4]


def test_who_comes_and_goes_unseen_is_left_out() -> None:
    runner_diff = RunnerDiff()
    runner_diff.enter(_new(4))
    runner_diff.leave(4)
    assert 4 not in runner_diff and runner_diff.drain([4]) == ([], [])


def test_a_slot_that_changes_hands_twice() -> None:
    runner_diff = RunnerDiff()
    runner_diff.enter(_new(4, seed=1))
    runner_diff.drain([4])
    runner_diff.leave(4)
    runner_diff.enter(_new(4, seed=2))
    runner_diff.leave(4)
    runner_diff.enter(_new(4, seed=3))
    assert runner_diff.drain([4]) == ([_new(4, seed=3)], [4])


def test_new_runners_know_nothing() -> None:
    runner_diff = RunnerDiff()
    runner_diff.enter(_new(4))
    runner_diff.drain([4])
    runner_diff.enter(_new(5))
    runner_diff.clear()
    runner_diff.leave(4)
    assert runner_diff.drain([4, 5]) == ([], [])

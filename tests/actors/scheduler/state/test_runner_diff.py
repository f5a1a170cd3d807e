"""A slot that changes hands between two steps is told of once, and rightly."""

from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.scheduler.state.runner_diff import News


def _new(handle: int, seed: int = 0) -> NewRequest:
    return NewRequest(handle, Sampling(seed=seed), 9)


def test_in_the_order_of_the_rows() -> None:
    news = News()
    for handle in (1, 2, 3):
        news.enter(_new(handle))
    assert 2 in news
    new, forgotten = news.take([3, 1, 2])
    assert [own.handle for own in new] == [3, 1, 2] and forgotten == []
    assert 2 not in news and news.take([1, 2, 3]) == ([], [])


def test_what_has_no_row_yet_waits() -> None:
    news = News()
    news.enter(_new(4))
    assert news.take([7]) == ([], [])
    assert [own.handle for own in news.take([4])[0]] == [4]


def test_who_comes_and_goes_unseen_is_left_out() -> None:
    news = News()
    news.enter(_new(4))
    news.leave(4)
    assert 4 not in news and news.take([4]) == ([], [])


def test_a_slot_that_changes_hands_twice() -> None:
    news = News()
    news.enter(_new(4, seed=1))
    news.take([4])
    news.leave(4)
    news.enter(_new(4, seed=2))
    news.leave(4)
    news.enter(_new(4, seed=3))
    assert news.take([4]) == ([_new(4, seed=3)], [4])


def test_new_runners_know_nothing() -> None:
    news = News()
    news.enter(_new(4))
    news.take([4])
    news.enter(_new(5))
    news.clear()
    news.leave(4)
    assert news.take([4, 5]) == ([], [])

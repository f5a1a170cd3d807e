"""Choices of one prompt fork from the first one, which does not change their tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import COPY

Make = Callable[..., Any]


def _prompt(length: int) -> list[int]:
    return [(11 * i + i * i // 5) % 50 for i in range(length)]


def _choices(h: Any, length: int, n: int = 4, max_tokens: int = 6, **settings: Any) -> list[Any]:
    fork_parent = h.add(_prompt(length), max_tokens, **settings)
    key = fork_parent.source.key
    return [
        fork_parent,
        *(h.add(_prompt(length), max_tokens, parent_key=key, **settings) for _ in range(n - 1)),
    ]


@pytest.fixture(params=[True, False])
def caching(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_siblings_compute_the_last_prompt_token_only(
    harness: Make, scheduler: str, caching: bool
) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=1, prefix_caching=caching)
    streams = _choices(h, 19)  # four full pages, and three tokens
    h.step()
    h.step()
    first, second = h.executor.log
    assert first.chunk_len.tolist() == [19]
    forked = ~second.is_decoding
    assert second.chunk_len[forked].tolist() == [1, 1, 1]
    assert second.kv_len[forked].tolist() == [18, 18, 18]
    assert second.moves[:, 0].tolist() == [COPY] * 3
    assert len(set(second.moves[:, 1])) == 1 and len(set(second.moves[:, 2])) == 3
    assert h.engine.lifecycle.state.tables.num_held == 4 + 4
    h.run()
    h.check()
    assert [stream.ended.cached_tokens for stream in streams] == [0, 18, 18, 18]
    assert len({tuple(stream.tokens) for stream in streams}) == 4


@pytest.mark.parametrize("length, copies", [(1, 0), (2, 3), (4, 3), (5, 0), (8, 3), (9, 0)])
def test_lengths(
    harness: Make, scheduler: str, steps_in_flight: int, caching: bool, length: int, copies: int
) -> None:
    """No copy where the last prompt token begins a page."""
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, prefix_caching=caching)
    streams = _choices(h, length)
    h.run()
    h.check()
    assert sum(len(step.moves) for step in h.executor.log) == copies
    assert [stream.ended.cached_tokens for stream in streams] == [0] + [length - 1] * 3


def test_a_whole_prompt_in_the_index_is_not_waited_for(harness: Make) -> None:
    h = harness()
    _choices(h, 17)
    h.step()
    assert h.executor.log[0].chunk_len.tolist() == [17, 1, 1, 1]
    h.run()
    h.check()


def test_siblings_wait_while_the_elder_is_in_its_prompt(harness: Make, caching: bool) -> None:
    h = harness(max_batch_tokens=8, prefix_caching=caching)
    streams = _choices(h, 31)
    h.run()
    h.check()
    prompts = [step for step in h.executor.log if step.prefill_batch]
    assert [step.chunk_len[~step.is_decoding].tolist() for step in prompts] == [
        [8],
        [8],
        [8],
        [7],
        [1, 1, 1],
    ]
    assert [stream.ended.cached_tokens for stream in streams] == [0, 30, 30, 30]


@pytest.mark.parametrize("length", range(5, 20))
def test_elder_that_is_short_of_a_few_tokens(
    harness: Make, steps_in_flight: int, caching: bool, length: int
) -> None:
    """Its last chunk shares no step with a choice that copies the page it writes."""
    h = harness(steps_in_flight=steps_in_flight, max_batch_tokens=8, prefix_caching=caching)
    _choices(h, length)
    h.run()
    h.check()


@pytest.mark.parametrize("moment", range(6))
def test_abort_of_the_elder(
    harness: Make, steps_in_flight: int, caching: bool, moment: int
) -> None:
    """Whether in its prompt or later: its siblings go on, or start on their own."""
    h = harness(steps_in_flight=steps_in_flight, max_batch_tokens=8, prefix_caching=caching)
    fork_parent, *siblings = _choices(h, 30)
    for _ in range(moment):
        h.step()
    h.abort(fork_parent)
    h.run()
    h.check()
    assert all(len(stream.tokens) == 6 for stream in siblings)


def test_elder_that_ends_with_its_first_token(
    harness: Make, scheduler: str, steps_in_flight: int, caching: bool
) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, prefix_caching=caching)
    fork_parent = h.add(_prompt(19), 1)
    for _ in range(3):
        h.add(_prompt(19), 5, parent_key=fork_parent.source.key)
    h.run()
    h.check()


@pytest.mark.parametrize("index", [0, 2])
def test_elder_that_fails(
    harness: Make, scheduler: str, steps_in_flight: int, caching: bool, index: int
) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, prefix_caching=caching)
    h.executor.errors = {(0, index)}
    streams = _choices(h, 19)
    h.run()
    h.check()
    reasons = [stream.ended.finish_reason for stream in streams]
    assert reasons == ["error", "length", "length", "length"]


@pytest.mark.parametrize("call", range(5))
def test_restart(
    harness: Make, scheduler: str, steps_in_flight: int, caching: bool, call: int
) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, prefix_caching=caching)
    h.executor.fail_at = {call}
    _choices(h, 19)
    h.run()
    h.check()
    assert h.executor.epoch == 1


def test_pressure(harness: Make, scheduler: str, steps_in_flight: int, caching: bool) -> None:
    """Elders and siblings are preempted, in a pool that two choices fill."""
    h = harness(
        scheduler=scheduler,
        steps_in_flight=steps_in_flight,
        prefix_caching=caching,
        num_pages=12,
        max_model_len=40,
    )
    for _ in range(3):
        _choices(h, 10, n=5, max_tokens=22)
    h.run()
    h.check()
    assert h.engine.stats().preemptions > 3
    assert sum(len(step.moves) for step in h.executor.log) > 3


def test_priority_elder_that_is_preempted_is_not_waited_for(harness: Make) -> None:
    """A more urgent request takes the elder's pages; the siblings wait for nothing that is gone."""
    h = harness(policy="priority", num_pages=12, max_model_len=40, max_batch_tokens=8)
    _choices(h, 30, n=3, priority=2)
    h.step()
    h.add([3] * 30, 10, priority=0)
    h.run()
    h.check()


def test_unknown_elder(harness: Make) -> None:
    h = harness()
    h.add(_prompt(19), 4, parent_key=77)
    h.run()
    h.check()


def test_keys_of_another_client_are_unknown(harness: Make) -> None:
    h = harness(prefix_caching=False)
    h.add(_prompt(9), 4, key=5, client="a")
    h.add([1, 2, 3], 4, client="b", parent_key=5)
    h.run()
    h.check()
    assert not any(len(step.moves) for step in h.executor.log)


@pytest.mark.parametrize("change", [{"prompt": [1, 2, 3]}, {"extra_keys": ("salt",)}])
def test_what_differs_is_no_sibling(harness: Make, change: dict[str, Any]) -> None:
    h = harness()
    fork_parent = h.add(_prompt(9), 4)
    with pytest.raises(InvalidRequest, match="one prompt"):
        h.add(**{"prompt": _prompt(9), "parent_key": fork_parent.source.key, **change})
    h.run()
    h.check()


def test_resubmitted_sibling_forks_its_prompt_only(harness: Make, caching: bool) -> None:
    """Its output is its own, and computed again."""
    h = harness(prefix_caching=caching, steps_in_flight=1)
    fork_parent = h.add(_prompt(10), 9)
    h.step()
    key = fork_parent.source.key
    again = h.add(_prompt(10), 9, output=[7, 7, 7, 7, 7], parent_key=key)
    h.run()
    h.check()
    step = next(step for step in h.executor.log if len(step.moves))
    assert (step.kv_len[-1], step.chunk_len[-1]) == (9, 6)
    assert again.ended.cached_tokens == 9

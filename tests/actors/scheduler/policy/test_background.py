"""Background requests: behind all others, out of their way, and with their own tokens."""

import itertools
from typing import Any

import pytest

from harness import Harness, make_harness
from rayfin.actors.errors import Overloaded
from rayfin.actors.timing import BACKGROUND_REST_SECONDS

POLICIES = ("fcfs", "priority", "fair")


def _running(h: Harness) -> list[bool]:
    """Of each running request, whether it is in the background."""
    return [own.source.background for own in h.engine.lifecycle.state.running.holders()]


@pytest.mark.parametrize("policy", POLICIES)
def test_background_requests_wait_behind_later_ones(policy: Any) -> None:
    h = make_harness(policy=policy, max_decoding_batch=1)
    background = [h.add(4, background=True, priority=-5) for _ in range(3)]
    others = [h.add(4, tenant=f"t{i}") for i in range(3)]
    ends: list[int] = []
    while h.engine.has_work:
        h.step()
        ends += [own.seed for own in h.streams.values() if own.ended and own.seed not in ends]
    assert ends == [own.seed for own in (*others, *background)]
    h.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["idle", "share"])
@pytest.mark.parametrize("scheduler", ["v0", "v1"])
def test_all_get_their_tokens_in_any_mix(policy: Any, mode: Any, scheduler: Any) -> None:
    """Pages are short, so that background requests are preempted again and again."""
    h = make_harness(
        policy=policy, batch_mode=mode, scheduler=scheduler, num_pages=24, max_decoding_batch=4
    )
    numbers = itertools.count()
    for round in range(12):
        for _ in range(2):
            h.add(6 + next(numbers) % 7, 9, background=True)
        if round % 2:
            h.add(5 + next(numbers) % 5, 6, tenant=f"t{round % 3}")
        for _ in range(4):
            h.step()
    h.run()
    h.check()


def test_resting_requests_do_nothing_and_keep_their_pages() -> None:
    h = make_harness(steps_in_flight=1)
    resting = [h.add(4, 20, background=True) for _ in range(2)]
    for _ in range(4):
        h.step()
    lengths = [len(own.tokens) for own in resting]
    assert all(lengths)
    other = h.add(4, 6)
    while other.open:
        h.step()
        assert [len(own.tokens) for own in resting] == lengths
    assert _running(h) == [True, True]
    h.run()
    h.check()
    assert h.engine.stats().preemptions == 0


@pytest.mark.parametrize("mode", ["idle", "share"])
def test_those_that_rest_for_long_give_their_pages_back(mode: Any) -> None:
    h = make_harness(batch_mode=mode, steps_in_flight=1)
    resting = [h.add(4, 60, background=True) for _ in range(2)]
    h.step()
    other = h.add(4, 30)
    h.step()
    h.executor.clock += BACKGROUND_REST_SECONDS - 1
    h.step()
    assert len(_running(h)) == 3
    h.executor.clock += 1.5
    h.step()
    assert _running(h) == ([False] if mode == "idle" else [True, True, False])
    assert other.open
    h.run()
    h.check()
    assert all(own.ended for own in resting)


def test_a_prompt_that_is_half_computed_goes_back_to_the_queue() -> None:
    h = make_harness(steps_in_flight=1, max_batch_tokens=8, max_model_len=200)
    background = h.add(60, 3, background=True)
    h.step()
    other = h.add(3, 3)
    h.step()
    assert _running(h) == [False]
    h.run()
    h.check()
    assert background.ended is not None and other.ended is not None


def test_sharing_requests_decode_beside_others() -> None:
    h = make_harness(batch_mode="share", steps_in_flight=1)
    background = h.add(4, 20, background=True)
    h.step()
    other = h.add(4, 6)
    before = len(background.tokens)
    while other.open:
        h.step()
    assert len(background.tokens) >= before + 5
    h.run()
    h.check()


@pytest.mark.parametrize("mode", ["idle", "share"])
def test_a_full_engine_makes_room(mode: Any) -> None:
    """For want of slots, then for want of pages: the next step has the other request."""
    for settings in ({"max_decoding_batch": 3}, {"num_pages": 9, "prefix_caching": False}):
        h = make_harness(batch_mode=mode, steps_in_flight=1, **settings)
        background = [h.add(8, 12, background=True) for _ in range(3)]
        for _ in range(3):
            h.step()
        held = len(_running(h))
        assert held >= 2 and all(_running(h))
        other = h.add(8, 4)
        h.step()
        assert len(other.tokens) == 1
        h.run()
        h.check()
        assert all(own.ended for own in background)


def test_a_foreground_request_waits_one_step_at_most() -> None:
    h = make_harness(steps_in_flight=1, max_decoding_batch=4)
    for _ in range(8):
        h.add(6, 40, background=True)
    for _ in range(30):
        other = h.add(5, 2)
        h.step()
        assert len(other.tokens) == 1, "it was not in the next step"
        h.step()
        assert not other.open
    h.run()
    h.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_of_background_requests_alone_are_short(depth: int) -> None:
    """A request that arrives waits for those in flight."""
    h = make_harness(steps_in_flight=depth, max_batch_tokens=256, max_model_len=400, num_pages=4000)
    h.executor.step_seconds, h.executor.token_seconds = 0.002, 0.004
    for _ in range(150):
        h.add(200, 40, background=True)
    for _ in range(60):
        h.step()
    alone = [len(info.merge_prompt) for info in h.executor.log[20:]]
    assert 32 < max(alone) <= 75, "of 49 tokens, which take 0.2 s"
    assert len(_running(h)) < 49
    assert len(h.engine._pipeline) == 0, "no second step is in flight"
    before = len(h.executor.log)
    other = h.add(200, 2)
    while not other.tokens:
        h.step()
    own = h.executor.log[before]
    assert own.prefill_batch == 1 and not own.decoding_batch, "the next step is its own"
    h.run()
    h.check()


def test_steps_of_a_slow_model_have_as_many_rows_as_before() -> None:
    """Where one token takes longer than a step should, small steps gain nothing."""
    h = make_harness(max_batch_tokens=64, max_decoding_batch=32, max_model_len=100, num_pages=4000)
    h.executor.step_seconds, h.executor.token_seconds = 0.7, 0.001
    for _ in range(60):
        h.add(30, 40, background=True)
    for _ in range(40):
        h.step()
    assert len(_running(h)) == 32
    h.run()
    h.check()


def test_a_slow_first_step_is_forgotten() -> None:
    """Prompts alone: no decoding row varies the size of steps."""
    h = make_harness(max_batch_tokens=256, max_model_len=300, num_pages=4000)
    h.executor.step_seconds, h.executor.token_seconds = 30.0, 0.0
    h.add(16, 1, background=True)
    h.step()
    h.executor.step_seconds, h.executor.token_seconds = 0.01, 0.001
    for place in range(60):
        h.add(200 + place, 1, background=True)
    for _ in range(20):
        h.step()
    assert max(info.num_prefill_tokens for info in h.executor.log[-6:]) > 120
    h.run()
    h.check()


class _Alone:
    """A gate that admits a request where no other class runs."""

    def __init__(self, h: Harness) -> None:
        self._h = h

    def may_admit(self, request: Any) -> bool:
        return all(kind == request.source.background for kind in _running(self._h))


@pytest.mark.parametrize("mode", ["idle", "share"])
def test_a_gate_that_background_requests_keep_shut_opens(mode: Any) -> None:
    h = make_harness(batch_mode=mode, steps_in_flight=1)
    h.engine.lifecycle.admission.gates.append(_Alone(h))
    for _ in range(3):
        h.add(6, 30, background=True)
    h.step()
    other = h.add(5, 4)
    for _ in range(5):
        h.step()
    assert not other.open
    h.run()
    h.check()


def test_background_requests_do_not_fill_the_queue() -> None:
    h = make_harness(max_waiting_requests=2, max_decoding_batch=1)
    for _ in range(6):
        h.add(4, background=True)
    h.add(4)
    h.add(4)
    with pytest.raises(Overloaded):
        h.add(4)
    h.add(4, background=True)
    h.run()
    h.check()


def test_an_aborted_background_request_is_gone() -> None:
    h = make_harness(max_decoding_batch=1)
    running, waiting = h.add(4, 20, background=True), h.add(4, background=True)
    h.step()
    h.abort(waiting)
    h.abort(running)
    h.run()
    h.check()


def test_background_requests_are_counted_apart() -> None:
    h = make_harness(max_decoding_batch=2, steps_in_flight=1)
    for _ in range(3):
        h.add(9, 20, background=True)
    h.step()
    stats = h.engine.stats()
    assert (stats.waiting_tokens, stats.background_waiting_tokens) == (0, 9)
    assert stats.background_pages == stats.pages_held > 0
    h.add(5, 20)
    assert h.engine.stats().waiting_tokens == 5
    h.step()
    stats = h.engine.stats()
    assert 0 < stats.background_pages < stats.pages_held
    h.run()
    stats = h.engine.stats()
    assert (stats.background_waiting_tokens, stats.background_pages) == (0, 0)
    h.check()

"""Poisonous requests are found with few deaths; no other is convicted, and none is lost."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import RequestHandedBack, RequestQuarantined
from rayfin.actors.scheduler.faults.quarantine import MAX_ENGINE_DEATHS
from rayfin.actors.timing import BLOCKED_PROMPT_SECONDS

Make = Callable[..., Any]


def blocked(stream: Any) -> bool:
    return stream.ended is not None and isinstance(stream.ended.error, RequestQuarantined)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_one_poison_among_many(
    harness: Make, scheduler: str, steps_in_flight: int, policy: str
) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, policy=policy)
    streams = [h.add(5 + n, 9, priority=n % 2, tenant="ab"[n % 2]) for n in range(6)]
    h.executor.poison = {3}
    h.run()
    h.check()
    assert [stream.seed for stream in streams if blocked(stream)] == [3]
    assert h.executor.deaths == {3: 3} and h.executor.epoch == 3


def test_step_that_says_what_is_wrong_convicts_at_once(harness: Make) -> None:
    h = harness()
    streams = [h.add(5 + n, 9) for n in range(6)]
    h.executor.poison, h.executor.poison_raises = {3}, True
    h.run()
    h.check()
    assert blocked(streams[3]) and h.executor.deaths == {3: 2}


def test_poison_alone(harness: Make) -> None:
    h = harness()
    stream = h.add(5, 9)
    h.executor.poison = {0}
    h.run()
    assert blocked(stream) and h.executor.deaths == {0: 3}
    assert stream.ended.error.code == "request_quarantined" and stream.ended.error.status == 500


def test_poison_that_has_spoken(harness: Make) -> None:
    """It becomes poisonous in the middle of its output, in a lease with others."""
    h = harness(max_lease=7, step_seconds=0.0005)
    streams = [h.add(4, 30) for _ in range(5)]
    while len(streams[2].tokens) < 9:
        h.step()
    h.executor.poison = {2}
    h.run()
    h.check()
    assert h.executor.deaths == {2: 3}


def test_several_poisons(harness: Make) -> None:
    h = harness(max_decoding_batch=16)
    streams = [h.add(6, 12) for _ in range(12)]
    h.executor.poison = {1, 5, 6, 11}
    h.run()
    h.check()
    assert {s.seed for s in streams if blocked(s)} == h.executor.poison
    assert h.executor.epoch <= 3 * len(h.executor.poison)
    assert h.executor.killed_alone == {}


def test_deaths_for_other_reasons_convict_nobody(harness: Make) -> None:
    """Each is alone at one death at most, and cleared before the next."""
    h = harness(max_batch_tokens=16)
    for _ in range(5):
        h.add(5, 40)
    h.executor.fail_at = {3, 20, 40, 60}
    h.run()
    h.check()
    assert h.executor.epoch == 4
    assert h.engine.stats().finished == {"length": 5}


def test_one_death_on_trial_is_chance(harness: Make) -> None:
    h = harness()
    streams = [h.add(5, 60) for _ in range(3)]
    h.executor.fail_at = {3, 4}
    h.run()
    h.check()
    assert h.executor.killed_alone == {0: 1} and h.executor.epoch == 2
    assert not any(blocked(stream) for stream in streams)


def test_prompt_of_the_convicted_is_refused_for_a_while(harness: Make) -> None:
    h = harness()
    h.add([1, 2, 3], 5)
    h.executor.poison = {0}
    h.run()
    with pytest.raises(RequestQuarantined):
        h.add([1, 2, 3], 5)
    h.add([1, 2, 4], 5)
    h.run()
    h.executor.clock += BLOCKED_PROMPT_SECONDS
    h.add([1, 2, 3], 5)
    h.run()
    h.check()


def test_requests_with_the_prompt_of_the_convicted_end_with_it(harness: Make) -> None:
    """Fifteen of one kind cost no more deaths than one; others get their answers."""
    h = harness(max_decoding_batch=4)
    same = [h.add([1, 2, 3], 5) for _ in range(15)]  # some are in flight, some wait
    others = [h.add(5, 9) for _ in range(3)]
    h.executor.poison = {stream.seed for stream in same}
    h.run()
    h.check()
    assert all(blocked(stream) for stream in same)
    assert h.executor.epoch == 3
    assert not any(blocked(stream) for stream in others)


def test_request_that_answered_since_outlives_its_prompt(harness: Make) -> None:
    """A prompt kills with some settings only: one that has spoken since the death goes on."""
    h = harness()
    innocent = h.add([1, 2, 3], 60)
    while len(innocent.tokens) < 5:
        h.step()
    guilty = h.add([1, 2, 3], 5)
    h.executor.poison = {guilty.seed}
    h.run()
    h.check()
    assert blocked(guilty) and not blocked(innocent)


def test_suspect_of_another_engine_is_tried_when_its_turn_comes(harness: Make) -> None:
    h = harness(max_decoding_batch=3)
    others = [h.add(6, 20) for _ in range(3)]
    h.step()
    suspect = h.add(6, 20, deaths=1)
    h.executor.poison = {suspect.seed}
    h.run()
    h.check()
    assert blocked(suspect) and not any(blocked(stream) for stream in others)
    assert h.executor.deaths == {suspect.seed: 2}  # alone at once


def test_suspect_whose_adapter_is_one_too_many_waits_for_its_trial(harness: Make) -> None:
    """Once it is cleared, it runs in the steps of the others."""
    h = harness(max_loras=1)
    first, second = (AdapterRef(name * 64, name, f"/{name}") for name in "ab")
    running = h.add(5, 9, adapter=first)
    while not running.tokens:
        h.step()
    suspect = h.add(5, 9, adapter=second, deaths=1)
    h.run()
    h.check()
    assert len(running.tokens) == len(suspect.tokens) == 9 and not blocked(suspect)


def test_innocent_suspect_of_another_engine(harness: Make) -> None:
    h = harness()
    for deaths in (0, 1, 0, 3):
        h.add(6, 12, deaths=deaths)
    h.run()
    h.check()
    with pytest.raises(RequestQuarantined):
        h.add(6, 12, deaths=MAX_ENGINE_DEATHS)


def test_suspect_may_be_aborted_or_end_while_tried(harness: Make) -> None:
    h = harness()
    streams = [h.add(5, 30), h.add(5, 2), h.add(5, 30)]
    h.executor.fail_at = {1}
    while not h.executor.epoch:
        h.step()
    h.abort(streams[0])
    h.step()
    h.abort(streams[2])
    h.run()
    h.check()
    assert streams[1].ended is not None


def test_beams_and_choices_are_tried_too(harness: Make) -> None:
    from rayfin.actors.messages import BeamParams

    h = harness()
    fork_parent = h.add(7, 9)
    h.add(fork_parent.source.prompt.tolist(), 9, parent_key=fork_parent.source.key)
    h.add(5, 6, beams=BeamParams(3))
    h.executor.fail_at = {3}
    h.run()
    h.check()
    assert h.executor.epoch == 1


def test_draining_engine_takes_nobody_and_moves_who_is_left(harness: Make) -> None:
    h = harness(max_decoding_batch=2)
    streams = [h.add(5, n) for n in (3, 50, 50)]
    h.step()
    h.engine.drain()
    assert h.engine.stats().draining
    with pytest.raises(RequestHandedBack):
        h.add(5, 3)
    while streams[0].ended is None:
        h.step()
    h.read(h.engine.fail_all(RequestHandedBack("it is being stopped")))
    assert streams[0].ended.finish_reason == "length"
    for stream in streams[1:]:
        assert isinstance(stream.ended.error, RequestHandedBack)
        assert stream.tokens == h.expected(stream)[0][: len(stream.tokens)]
    h.engine.check_integrity()

"""A pause is a gate and a depth of no steps; new weights come between two steps."""

from typing import Any

import pytest

from harness import Harness, make_harness
from rayfin.actors.errors import EngineBusy, EnginePaused, RequestHandedBack
from rayfin.actors.messages import Command
from rayfin.actors.weights.spans import as_json
from rayfin.actors.weights.version import WantedWeights, WeightVersion


def version(serial: int) -> WeightVersion:
    return WeightVersion(serial, str(serial), f"{serial:064x}", "/nowhere")


def until_paused(harness: Harness) -> int:
    steps = 0
    while not harness.engine.updates.is_paused:
        harness.step()
        steps += 1
        assert steps < 200, "it does not pause"
    return steps


@pytest.mark.parametrize("pages", ["recompute", "keep"])
def test_requests_go_on_with_new_weights(pages: Any) -> None:
    harness = make_harness(num_pages=64)
    streams = [harness.add([1, 2, 3] * 5, 20) for _ in range(3)]
    for _ in range(4):
        harness.step()
    updates, index = harness.engine.updates, harness.engine.lifecycle.state.tables.index
    assert index is not None and len(index)
    updates.pause("keep")
    assert until_paused(harness) <= harness.config.steps_in_flight
    before = [len(own.tokens) for own in streams]
    assert min(before) > 0 and not harness.engine.has_steps and not harness.engine.has_work
    harness.step()
    assert [len(own.tokens) for own in streams] == before, "it steps in a pause"
    harness.add([9, 9, 9, 9, 9], 5)
    updates.commit(version(1), in_place=True, pages=pages)
    assert len(index) == 0
    updates.commit(version(1), in_place=True, pages=pages)  # once more
    assert harness.executor.version == 1
    harness.step()
    assert [len(own.tokens) for own in streams] == before
    updates.resume()
    harness.run()
    harness.check()
    stats = harness.engine.stats()
    assert stats.weight_serial == 1 and stats.weights[0] == "1" and not stats.paused
    assert stats.carried_requests == {"kept" if pages == "keep" else "recomputed": 3}


def test_requests_go_elsewhere_before_it() -> None:
    harness = make_harness()
    stream = harness.add(4, 6)
    harness.step()
    updates = harness.engine.updates
    updates.leave()
    state = updates.state(None)
    assert (state.leaving, state.pausing, state.requests) == (True, False, 1)
    assert harness.engine.stats().draining  # as clients see it
    with pytest.raises(RequestHandedBack):
        harness.add(4, 3)
    harness.run()  # it goes on until a client moves it
    assert len(stream.tokens) == 6
    updates.resume()
    assert not harness.engine.stats().draining and not updates.state(None).leaving
    harness.add(4, 3)
    harness.run()
    harness.check()


def test_what_waits_and_what_is_refused() -> None:
    harness = make_harness(max_decoding_batch=2)
    running = [harness.add(4, 6) for _ in range(2)]
    harness.step()
    waiting = harness.add(4, 3)
    harness.engine.updates.pause("wait", "refuse")
    with pytest.raises(EnginePaused):
        harness.add(4, 3)
    moved = harness.add([5, 6, 7], 9, output=[1, 2])
    with pytest.raises(EngineBusy):
        harness.engine.updates.commit(version(1), in_place=True, pages="recompute")
    until_paused(harness)
    assert all(own.ended is not None for own in running), "they finish before"
    assert not waiting.labels and not moved.labels
    harness.engine.updates.commit(version(1), in_place=False, pages="keep")
    harness.engine.updates.resume()
    harness.run()
    harness.check()
    assert set(waiting.labels) == set(moved.labels) == {"1"}


def test_requests_that_want_a_version() -> None:
    harness = make_harness(max_decoding_batch=1)
    with pytest.raises(EngineBusy, match="serves the weights 'default', not '1'"):
        harness.add(4, 3, parts=(WantedWeights("1"),))
    running, waiting, other = (harness.add(4, 6, parts=(WantedWeights("default"),)) for _ in "123")
    harness.step()
    harness.engine.updates.pause("keep")
    until_paused(harness)
    harness.engine.updates.commit(version(1), in_place=True, pages="recompute")
    harness.engine.updates.resume()
    moved = harness.add([5, 6, 7], 9, output=[1, 2], parts=(WantedWeights("default"),))
    harness.run()
    for own in (waiting, other):
        assert own.ended is not None and isinstance(own.ended.error, EngineBusy)
    assert {"default", "1"} == set(running.labels) and set(moved.labels) == {"1"}


def test_abort_ends_all_with_what_they_have() -> None:
    harness = make_harness()
    streams = [harness.add(4, 30) for _ in range(2)]
    for _ in range(5):
        harness.step()
    harness.engine.updates.pause("abort")
    until_paused(harness)
    assert [own.ended.finish_reason for own in streams if own.ended is not None] == ["abort"] * 2
    assert all(own.tokens for own in streams)
    harness.check()


def test_a_score_is_of_one_version() -> None:
    """A prompt that is being scored is scored to its end before the pause."""
    harness = make_harness(max_batch_tokens=8, steps_in_flight=1)
    scored = harness.add([1, 2, 3, 4, 5] * 8, 2, prompt_logprobs=1)
    harness.step()
    harness.step()
    assert 0 < len(scored.prompt_logprobs) < 39
    harness.engine.updates.pause("keep")
    until_paused(harness)
    assert len(scored.prompt_logprobs) == 39 and set(scored.scored) == {0}
    harness.engine.updates.commit(version(1), in_place=True, pages="recompute")
    harness.engine.updates.resume()
    harness.run()
    harness.check()


def test_runners_that_die_amid_it_come_back_with_it() -> None:
    harness = make_harness()
    streams = [harness.add(4, 12) for _ in range(2)]
    for _ in range(3):
        harness.step()
    harness.engine.updates.pause("keep")
    until_paused(harness)
    harness.executor.fail_turns = 1
    harness.engine.updates.commit(version(1), in_place=True, pages="keep")
    assert harness.engine.updates.is_paused and harness.executor.version == 1
    harness.engine.updates.resume()
    harness.run()
    harness.check()
    assert all({"default", "1"} == set(own.labels) for own in streams)
    assert harness.engine.stats().runner_restarts == 1


def test_logs_tell_spans() -> None:
    from rayfin.actors.messages import Receipt

    harness = make_harness(steps_in_flight=1)
    stream = harness.add(4, 10)
    stream.source.receipt = Receipt("answer", 0, b"")
    for _ in range(4):
        harness.step()
    before = len(stream.tokens)
    for serial in (1, 2):
        harness.engine.updates.pause("keep")
        until_paused(harness)
        harness.engine.updates.commit(version(serial), in_place=True, pages="keep")
        harness.engine.updates.resume()
        harness.step()
    harness.run()
    (log,) = harness.engine.recall("", [stream.source.request_id])
    assert log is not None and log.tokens == stream.tokens
    spans = as_json(log.spans)
    assert spans[0] == {"version": "default", "start": 0, "end": before}
    assert spans[-1]["version"] == "2" and spans[-1]["end"] == 10 and spans[-1]["kv"] == "kept"


def test_a_pause_is_no_stall() -> None:
    """An engine that goes on after a long pause is not taken for one that hangs."""
    harness = make_harness()
    harness.add(4, 30)
    for _ in range(3):
        harness.step()
    harness.engine.updates.pause("keep")
    until_paused(harness)
    harness.executor.clock += 1000.0
    harness.engine.updates.resume()
    assert harness.engine.has_work and harness.engine.stats().seconds_since_progress == 0.0
    harness.executor.clock += 5.0
    assert harness.engine.stats().seconds_since_progress == 5.0
    harness.run()
    harness.check()


def test_what_comes_after_an_abort_waits() -> None:
    """The order may come twice: its answer was lost, or an engine beside it has begun."""
    harness = make_harness()
    running = harness.add(4, 30)
    harness.step()
    harness.engine.updates.pause("abort")
    waiting = harness.add(4, 3)
    harness.engine.updates.pause("abort")
    until_paused(harness)
    harness.engine.updates.resume()
    harness.run()
    assert running.ended is not None and running.ended.finish_reason == "abort"
    assert waiting.ended is not None and waiting.ended.finish_reason == "length"
    harness.check()


@pytest.mark.parametrize("in_place", [True, False])
def test_new_weights_for_one_that_sleeps(in_place: bool) -> None:
    """It has no pages before it wakes."""
    harness = make_harness()
    stream = harness.add(4, 12)
    for _ in range(3):
        harness.step()
    harness.engine.carry_out(Command.SLEEP)
    harness.engine.updates.pause("keep")
    until_paused(harness)
    harness.engine.updates.commit(version(1), in_place=in_place, pages="keep")
    harness.engine.updates.resume()
    assert harness.executor.asleep and harness.engine.stats().asleep
    harness.engine.carry_out(Command.WAKE)
    harness.run()
    harness.check()
    assert {"default", "1"} == set(stream.labels)

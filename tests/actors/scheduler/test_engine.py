"""The engine's doors: what it refuses, how requests end, what it tells."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rayfin.actors.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RayfinError,
    RequestFailed,
    RunnerGroupFailed,
)
from rayfin.actors.messages import SAMPLED_LAST_STEP
from rayfin.actors.scheduler.engine import MAX_RESTARTS_WITHOUT_PROGRESS
from rayfin.cache.errors import CacheError

Make = Callable[..., Any]


def test_idle_engine_does_nothing(harness: Make) -> None:
    h = harness()
    assert not h.engine.has_work
    assert h.engine.step() == {}
    assert h.executor.num_submitted == 0


def test_one_token(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight)
    stream = h.add(5, 1)
    h.step()
    assert len(stream.tokens) == 1 and stream.ended.finish_reason == "length"
    h.run()
    assert h.executor.num_submitted == 1  # its length is known beforehand: no step too many


def test_too_long_is_refused(harness: Make) -> None:
    h = harness(max_model_len=20)
    with pytest.raises(ContextLengthExceeded) as caught:
        h.add(15, 6)
    assert caught.value.param == "prompt"
    assert not h.engine.has_work
    h.add(15, 5)
    h.run()
    h.check()


def test_empty_prompt_is_refused(harness: Make) -> None:
    with pytest.raises(InvalidRequest):
        harness().add([], 3)


@pytest.mark.parametrize("max_tokens, output", [(0, []), (3, [5, 6, 7]), (3, [5, 6, 7, 8])])
def test_nothing_left_to_generate_is_refused(
    harness: Make, max_tokens: int, output: list[int]
) -> None:
    """Such a request would write past its table, and take the others down with it."""
    h = harness(max_model_len=16)
    with pytest.raises(InvalidRequest) as caught:
        h.add(16 - max_tokens, max_tokens, output=output)
    assert caught.value.param == "max_tokens"
    assert not h.engine.has_work


def test_full_queue(harness: Make) -> None:
    h = harness(max_waiting_requests=2)
    h.add(3)
    h.add(3)
    with pytest.raises(Overloaded):
        h.add(3)
    h.step()  # both run now
    h.add(3)
    h.run()
    h.check()


def test_aborted_requests_leave_the_queue(harness: Make) -> None:
    h = harness(max_waiting_requests=2)
    first = h.add(3)
    h.add(3)
    h.abort(first)
    h.add(3)
    h.run()
    h.check()
    assert h.executor.entered == [1, 2]


def test_key_in_use(harness: Make) -> None:
    h = harness()
    h.add(3, key=7, client="a")
    with pytest.raises(InvalidRequest):
        h.add(4, key=7, client="a")
    h.add(5, key=7, client="b")  # another client's numbers are its own
    h.run()
    h.check()
    h.add(3, key=7, client="a")  # free again
    h.run()
    h.check()


def test_abort(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight)
    stream, other = h.add(6, 20), h.add(6, 8)
    h.step()
    h.abort(stream)
    held = h.engine.lifecycle.state.tables.num_held
    assert held == len(h.engine.lifecycle.state.tables.pages_since(other_slot(h, other), 0))
    h.abort(stream)  # unknown by now: ignored
    h.engine.abort("unknown", 99)
    h.run()
    h.check()
    assert h.engine.stats().finished == {"abort": 1, "length": 1}


def other_slot(h: Any, stream: Any) -> int:
    running = h.engine.lifecycle.state.running
    return int(next(s for s in running.slots() if running.request(s).source is stream.source))


def test_abort_client(harness: Make) -> None:
    h = harness(max_decoding_batch=2)
    gone = [h.add(4, 6, client="gone") for _ in range(3)]
    stays = h.add(4, 6, client="stays")
    h.step()
    h.engine.abort_client("gone")
    for stream in gone:
        stream.aborted = True
    h.run()
    h.check()
    assert stays.ended is not None


def test_stop_token_and_eos(harness: Make, steps_in_flight: int) -> None:
    h = harness(steps_in_flight=steps_in_flight)
    free = h.add(list(range(6)), 10)
    h.run()
    token = free.tokens[3]
    first = free.tokens.index(token) + 1

    def again(**rules: Any) -> Any:
        probe = harness(steps_in_flight=steps_in_flight)
        stream = probe.add(list(range(6)), 10, **rules)  # the same seed, so the same tokens
        probe.run()
        probe.check()
        assert stream.tokens == free.tokens[:first]
        return stream.ended

    assert (again(stop=[token]).finish_reason, again(stop=[token]).stop_reason) == ("stop", token)
    assert again(eos=[token]).stop_reason is None
    unseen = [t for t in range(50) if t not in free.tokens]
    assert again(stop=[token, *unseen]).stop_reason == token  # more than the table holds
    assert again(stop=[*unseen], eos=[token]).stop_reason is None


def test_stop_goes_before_length(harness: Make) -> None:
    h = harness()
    free = h.add([1, 2, 3], 2)
    h.run()
    again = harness()
    stream = again.add([1, 2, 3], 2, stop=[free.tokens[1]])
    again.run()
    assert stream.tokens == free.tokens
    assert stream.ended.finish_reason == ("stop" if free.tokens[0] != free.tokens[1] else "length")


def test_tokens_past_a_stop_are_thrown_away(harness: Make) -> None:
    """With two steps in flight one more token is computed, and not delivered."""
    free = harness()
    stream = free.add([5, 6, 7], 8)
    free.run()
    stop = stream.tokens[2]
    h = harness(steps_in_flight=2)
    stopped = h.add([5, 6, 7], 8, stop=[stop])
    h.run()
    h.check()
    assert h.executor.num_run == len(stopped.tokens) + 1
    assert h.engine.stats().generation_tokens == len(stopped.tokens)


def test_second_step_in_flight_uses_placeholders(harness: Make) -> None:
    h = harness(steps_in_flight=2)
    h.add(3, 5)
    h.run()
    merged = [step.merge_prompt.tolist() for step in h.executor.log]
    assert merged[1:] == [[SAMPLED_LAST_STEP]] * 4
    one = harness(steps_in_flight=1)
    one.add(3, 5)
    one.run()
    assert all(SAMPLED_LAST_STEP not in step.merge_prompt for step in one.executor.log)


def test_runners_forget_finished_requests(harness: Make) -> None:
    h = harness()
    for _ in range(6):
        h.add(5, 3)
    h.run()
    last = h.add(2, 2)
    h.step()
    assert [mirror.stream.seed for mirror in h.executor.live.values()] == [last.seed]


def test_failed_row_ends_alone(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight)
    streams = [h.add(4, 6) for _ in range(3)]
    h.executor.errors = {(1, 2)}
    h.run()
    h.check()
    assert len(streams[1].tokens) == 2
    assert isinstance(streams[1].ended.error, RequestFailed)
    assert streams[1].ended.error.message == "planted"


def test_group_failure_delivers_nothing_twice(harness: Make, steps_in_flight: int) -> None:
    h = harness(steps_in_flight=steps_in_flight, max_batch_tokens=8)
    h.executor.fail_at = {4, 5, 9}
    h.executor.fail_submit_at = {2}
    for length in (3, 18, 7):
        h.add(length, 9)
    h.run()
    h.check()
    assert h.executor.epoch == 4
    assert h.engine.stats().epoch == 4


def test_gives_up_without_progress(harness: Make) -> None:
    h = harness()
    h.add(3, 5)
    h.step()
    h.executor.fail_at = {h.executor.num_run}
    h.executor.fail_restarts = MAX_RESTARTS_WITHOUT_PROGRESS
    with pytest.raises(RunnerGroupFailed):
        h.step()
    assert h.executor.fail_restarts == 0 and h.executor.epoch == 0


def test_restart_that_fails_is_tried_again(harness: Make) -> None:
    h = harness()
    h.add(3, 5)
    h.executor.fail_at = {1}
    h.executor.fail_restarts = MAX_RESTARTS_WITHOUT_PROGRESS - 1
    h.run()
    h.check()
    assert h.executor.epoch == 1


def test_progress_forgives_restarts(harness: Make) -> None:
    h = harness(steps_in_flight=1)
    h.add(3, 30)
    h.executor.fail_at = set(range(1, 40, 2))
    h.run()
    h.check()
    assert h.executor.epoch > MAX_RESTARTS_WITHOUT_PROGRESS


def test_wrong_answer_restarts_the_group(harness: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """I21: a result of another step or epoch changes nothing."""
    h = harness(steps_in_flight=1)
    stream = h.add(3, 5)
    run, answers = h.executor.run, 0

    def stale(info: Any) -> Any:
        nonlocal answers
        result, answers = run(info), answers + 1
        if answers == 2:
            result.step -= 1
        return result

    monkeypatch.setattr(h.executor, "run", stale)
    h.run()
    h.check()
    assert h.executor.epoch == 1 and len(stream.tokens) == 5


def test_fail_all(harness: Make) -> None:
    h = harness(max_decoding_batch=2)
    streams = [h.add(5, 9) for _ in range(4)]
    h.step()
    h.read(h.engine.fail_all(EngineUnavailable("out of luck")))
    for stream in streams:
        assert stream.ended.finish_reason == "error"
        assert isinstance(stream.ended.error, RayfinError) and "luck" in str(stream.ended.error)
    assert h.engine.lifecycle.state.tables.num_held == 0
    h.engine.check_integrity()


def test_one_message_per_client_and_step(harness: Make) -> None:
    h = harness(steps_in_flight=1)
    for client in "abab":
        h.add(3, 2, client=client)
    messages = h.engine.step()
    assert messages.keys() == {"a", "b"}
    assert [messages[c].keys.tolist() for c in "ab"] == [[0, 2], [1, 3]]
    assert messages["a"].keys.dtype == np.int64 and messages["a"].tokens.dtype == np.int32


def test_times_come_with_the_first_token(harness: Make) -> None:
    """Of a request that asks for them, also if a stop string will end it without a last message."""
    h = harness(max_decoding_batch=1, steps_in_flight=1)
    h.add(3, 4)
    timed = h.add(3, 4)
    timed.source.timed = True
    found = []
    while h.engine.has_work:
        h.executor.clock += 1.0
        found += [(own.begun, own.keys.tolist(), own.ended) for own in h.engine.step().values()]
    sent = [(begun, keys) for begun, keys, _ in found if begun]
    assert len(sent) == 1 and sent[0][1] == [1]
    (begun,) = sent[0][0].values()
    assert 4 <= begun.queued <= begun.first_token
    ends = [end for _, _, ended in found for end in ended]
    assert (ends[1].queued, ends[1].first_token, ends[1].cached_tokens) == begun


def test_stats(harness: Make) -> None:
    h = harness(max_decoding_batch=2, num_pages=30, steps_in_flight=1)
    h.add(5, 3)
    h.add(6, 3)
    h.add(7, 3)
    stats = h.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_total, stats.pages_held) == (0, 3, 30, 0)
    assert stats.prompt_tokens == 18
    h.step()
    stats = h.engine.stats()
    assert (stats.running, stats.waiting, stats.steps) == (2, 1, 1)
    assert stats.pages_held == h.engine.lifecycle.state.tables.num_held == 4
    assert stats.generation_tokens == 2
    h.run()
    stats = h.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    assert stats.generation_tokens == 9 and stats.finished == {"length": 3}
    assert stats.seconds_since_progress == 0.0


def test_check_integrity_finds_a_lost_page(harness: Make) -> None:
    h = harness()
    h.add(5, 9)
    h.step()
    h.engine.lifecycle.state.tables.pool.allocate(1)
    with pytest.raises(CacheError):
        h.engine.check_integrity()

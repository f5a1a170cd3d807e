"""Guided requests wait for their grammars beside the queue, and never for ever."""

import math
from dataclasses import replace
from typing import Any

import pytest

from fake_stream import Stream
from harness import Harness, make_harness
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RequestHandedBack,
)
from rayfin.actors.guidance import CallGrammar, Guidance, Thinking
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.scheduler.queues.preparation import MOST_KNOWN, MOST_SKIPPING
from rayfin.actors.timing import PREPARE_SECONDS

GUIDED = Guidance("slow")


def slow(seconds: float = 1.0, **settings: Any) -> Harness:
    """An engine whose runner takes so long for the grammar."""
    h = make_harness(step_seconds=0.01, **settings)
    h.executor.prepare_seconds["slow"] = seconds
    return h


def counts(h: Harness) -> tuple[int, int, int]:
    """Running, waiting, and of those being prepared for."""
    stats = h.engine.stats()
    return stats.running, stats.waiting, len(h.engine.lifecycle.preparations)


def waits(stats: EngineStats) -> int:
    return stats.histograms["grammar_wait_seconds"].count


def test_others_pass_a_request_that_waits(scheduler: str) -> None:
    h = slow(scheduler=scheduler)
    waiting, other = h.add(9, 3, guidance=GUIDED), h.add(9, 3)
    assert counts(h) == (0, 2, 1)
    h.step()
    assert counts(h) == (1, 1, 1) and h.engine.has_steps
    while other.open:
        h.step()
    assert waiting.tokens == [] and h.engine.has_work and not h.engine.has_steps
    h.run()
    h.check()
    assert h.executor.prepared == ["slow"]
    stats = h.engine.stats()
    assert waits(stats) == 1
    assert stats.histograms["grammar_wait_seconds"].sum == pytest.approx(1.0)


def quick(text: str) -> Guidance:
    return Guidance(text, quick=True)


def test_no_request_waits_for_a_quick_grammar() -> None:
    h = slow()
    h.add(4, 2, guidance=Guidance("first"))  # the runner has its vocabulary then
    asked = h.add(4, 2, guidance=quick("slow"))
    assert counts(h) == (0, 2, 0)
    h.run()
    assert len(asked.tokens) == 2 and h.executor.prepared == ["first"]
    h.check()


def test_a_new_runner_answers_before_a_quick_grammar_skips() -> None:
    """Its step would wait for the vocabulary. An adapter needs none."""
    h = slow(0.5, max_loras=1)
    h.executor.prepare_seconds["other"] = 0.5
    h.add(4, 2, adapter=AdapterRef("ab" * 16, "plain", "/plain"))
    for number in range(2):
        assert all(h.add(4, 2, guidance=quick(text)).waited for text in ("slow", "other"))
        h.run()
        assert not h.add(4, 2, guidance=quick(f"later {number}")).waited
        h.run()
        h.add(4, 8)
        h.executor.fail_at = {h.executor.num_run}
        h.run()
        assert h.executor.epoch == number + 1
    assert h.executor.prepared == ["plain", "slow", "other", "slow", "other"]
    h.check()


def test_few_quick_grammars_skip_at_a_time() -> None:
    """A step waits for those that are new in it: no more than that, however many come."""
    h = slow(max_decoding_batch=1)
    running = h.add(4, 8, guidance=Guidance("first"))
    h.step()
    h.executor.prepare_seconds = {str(number): 1.0 for number in range(12)}

    def waits(text: str) -> bool:
        return h.add(4, 2, guidance=quick(text)).waited

    skipping = [h.add(4, 2, guidance=quick(str(number))) for number in range(MOST_SKIPPING)]
    assert not any(stream.waited for stream in skipping)
    assert waits("4") and not waits("0") and not waits("first")
    h.step()  # none of them has begun
    assert running.open and waits("5")
    h.abort(skipping[1])
    h.step()
    assert not waits("6") and waits("7")
    h.run()
    assert not any(waits(text) for text in ("8", "9", "10", "11"))
    assert not any(waits(text) for text in ("0", "2", "3", "4", "5", "6", "7"))  # that are known
    assert waits("1")
    h.run()
    assert h.executor.prepared == ["first", "4", "5", "7", "1"]
    h.check()


def test_it_takes_its_place_by_arrival() -> None:
    h = slow(0.05, max_decoding_batch=1)
    running, guided, late = h.add(4, 12), h.add(4, 2, guidance=GUIDED), h.add(4, 2)
    h.run()
    assert h.executor.entered == [running.seed, guided.seed, late.seed]
    h.check()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_known_grammar_is_not_sent_again(policy: str) -> None:
    h = slow(policy=policy)
    h.add(4, 2, guidance=GUIDED)
    h.run()
    again = h.add(4, 2, guidance=GUIDED)
    assert counts(h) == (0, 1, 0) and not again.waited
    h.run()
    assert h.executor.prepared == ["slow"]
    h.check()


def test_one_call_for_all_that_wait() -> None:
    h = slow()
    streams = [h.add(4, 2, guidance=GUIDED) for _ in range(3)]
    both = h.add(4, 2, guidance=Guidance("slow", CallGrammar((1,), "quick")))
    assert h.executor.prepared == ["slow", "quick"] and both.waited
    h.run()
    assert all(len(stream.tokens) == 2 for stream in streams)
    h.check()


def test_the_last_used_are_known() -> None:
    h = slow()
    for number in range(MOST_KNOWN):
        h.add(2, 1, guidance=Guidance(str(number)))
    h.add(2, 1, guidance=Guidance("0"))
    h.add(2, 1, guidance=Guidance("one more"))
    h.run()
    assert len(h.executor.prepared) == MOST_KNOWN + 1
    h.add(2, 1, guidance=Guidance("0"))
    assert len(h.executor.prepared) == MOST_KNOWN + 1
    h.add(2, 1, guidance=Guidance("1"))
    assert h.executor.prepared[-1] == "1"
    h.run()
    h.check()


def test_a_thought_has_nothing_to_compile() -> None:
    h = slow()
    thought = h.add(4, 3, guidance=Guidance(thinking=Thinking("</t>", (1,), True, budget=2)))
    assert not thought.waited and h.executor.prepared == []
    h.run()
    h.check()


def test_a_grammar_that_does_not_compile_ends_its_requests() -> None:
    h = slow()
    h.executor.grammar_errors.add("slow")
    failing, fine = [h.add(4, 3, guidance=GUIDED) for _ in range(2)], h.add(4, 3)
    h.run()
    for stream in failing:
        assert stream.ended is not None
        error = stream.ended.error
        assert isinstance(error, InvalidRequest) and error.code == "grammar_failed"
        assert "does not compile" in error.message
    first, second = (stream.ended for stream in failing)
    assert first and second and first.error is not second.error, "each client names its own field"
    assert fine.ended is not None and fine.ended.finish_reason == "length"
    stats = h.engine.stats()
    assert stats.grammar_failures == {"compile": 2} and stats.failed == {"grammar_failed": 2}
    assert stats.waiting_tokens == 0
    h.add(4, 3, guidance=GUIDED)
    assert h.executor.prepared == ["slow", "slow"]
    h.run()
    h.check()


def test_one_that_fails_at_once() -> None:
    h = slow(0.0)
    h.executor.grammar_errors.add("slow")
    stream = h.add(4, 3, guidance=GUIDED)
    h.run()
    assert stream.ended is not None and stream.tokens == []
    assert h.executor.num_run == 0
    h.check()


def test_a_lost_call_is_not_waited_for() -> None:
    """The oldest request runs, and its step compiles; the others get their time again."""
    h = slow(math.inf)
    h.executor.prepare_seconds["lost"] = math.inf
    first, second = h.add(4, 2, guidance=GUIDED), h.add(4, 2, guidance=Guidance("lost"))
    while first.open:
        h.step()
        h.wait()
    assert PREPARE_SECONDS <= h.executor.clock < PREPARE_SECONDS + 1 and second.open
    h.run()
    assert 2 * PREPARE_SECONDS <= h.executor.clock < 2 * PREPARE_SECONDS + 1
    assert h.executor.prepared == ["slow", "lost"]
    h.check()


def test_calls_that_are_answered_give_the_others_time() -> None:
    h = slow(PREPARE_SECONDS * 1.5)
    h.executor.prepare_seconds["before"] = PREPARE_SECONDS * 0.75
    h.add(4, 2, guidance=Guidance("before"))
    h.add(4, 2, guidance=GUIDED)
    h.run()
    assert h.executor.clock >= PREPARE_SECONDS * 1.5
    assert waits(h.engine.stats()) == 2
    h.check()


def test_new_runners_release_all_and_know_nothing() -> None:
    h = slow()
    h.add(4, 8)
    h.step()
    h.add(4, 2, guidance=Guidance("known"))
    waiting = h.add(4, 2, guidance=GUIDED)
    h.executor.fail_at = {h.executor.num_run}
    h.step()
    assert counts(h)[2] == 0 and h.executor.epoch == 1
    h.run()
    assert h.executor.clock < 1.0 and len(waiting.tokens) == 2
    h.add(4, 2, guidance=Guidance("known"))
    assert h.executor.prepared == ["known", "slow", "known"]
    h.run()
    h.check()


def test_runners_that_die_while_all_wait() -> None:
    h = slow(math.inf)
    h.executor.fail_submit_at = {0}
    waiting = h.add(4, 2, guidance=GUIDED)
    other = h.add(4, 2)
    h.run()
    assert h.executor.clock < 1.0 and len(waiting.tokens) == len(other.tokens) == 2
    h.check()


def test_an_idle_engine_waits_and_does_not_spin() -> None:
    h = slow()
    h.add(4, 2, guidance=GUIDED)
    assert h.engine.has_work and not h.engine.has_steps
    assert h.engine.step() == {} and h.executor.num_submitted == 0
    h.run()
    h.check()


# What ends a request in the queue ends it here.


def test_deadline() -> None:
    h = slow(math.inf)
    stream = h.add(4, 2, guidance=GUIDED, timeout=0.3)
    h.run()
    assert stream.ended is not None and isinstance(stream.ended.error, DeadlineExceeded)
    assert h.executor.clock == pytest.approx(0.3, abs=0.06)
    assert h.engine.stats().waiting_tokens == 0


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_aborts(policy: str) -> None:
    h = slow(policy=policy)
    streams = [h.add(4, 2, guidance=GUIDED, client=client) for client in "aabb"]
    h.abort(streams[0])
    h.engine.abort_client("b")
    for stream in streams[2:]:
        stream.aborted = True
    assert counts(h) == (0, 1, 1)
    h.run()
    h.check()
    assert len(streams[1].tokens) == 2 and h.executor.entered == [streams[1].seed]
    again = h.add(4, 2, guidance=GUIDED)
    assert not again.waited  # the grammar was compiled for those that left, too


def test_recall() -> None:
    h = slow()
    stream = h.add(4, 2, guidance=GUIDED, tenant="t")
    assert h.engine.recall("t", [stream.source.request_id]) == [None]  # it has no receipt
    h.read(h.engine.step())
    assert stream.ended is not None and stream.ended.finish_reason == "abort"
    assert not h.engine.has_work


def test_queue_limits_and_snapshot() -> None:
    h = slow(max_waiting_requests=2)
    h.add(5, 2, guidance=GUIDED)
    h.add(7, 2, guidance=GUIDED)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        h.add(1, 1)
    stats, snapshot = h.engine.stats(), h.engine.snapshot("e")
    assert (stats.waiting, stats.waiting_tokens, stats.deferred) == (2, 12, 2)
    assert snapshot.num_waiting == 2 and [view.prompt for view in snapshot.waiting] == [5, 7]
    h.run()
    assert h.engine.stats().waiting_tokens == 0
    h.check()


def test_drain_finishes_them() -> None:
    h = slow()
    stream = h.add(4, 2, guidance=GUIDED)
    h.engine.drain()
    with pytest.raises(RequestHandedBack):
        h.add(4, 2, guidance=GUIDED)
    h.run()
    assert len(stream.tokens) == 2
    h.check()


def test_an_evicted_request_is_handed_back() -> None:
    h = slow()
    stream = h.add(4, 2, guidance=GUIDED)
    h.read(h.engine.fail_all(RequestHandedBack("it stops")))
    assert stream.ended is not None and isinstance(stream.ended.error, EngineUnavailable)
    assert counts(h) == (0, 0, 0) and not h.engine.has_work


def test_sleep_and_wake() -> None:
    h = slow()
    stream = h.add(4, 2, guidance=GUIDED)
    h.engine.sleep()
    assert not h.engine.has_work and h.engine.step() == {}
    h.engine.wake()
    h.run()
    assert len(stream.tokens) == 2
    h.check()


def test_a_suspect_waits_here_and_then_for_its_trial() -> None:
    h = slow()
    suspect, other = h.add(4, 3, guidance=GUIDED, deaths=1), h.add(4, 3)
    h.run()
    h.check()
    assert h.executor.entered == [other.seed, suspect.seed]


# Tokens depend on the history and the grammar alone: whatever moves a request, it goes on.


def truth(h: Harness, stream: Stream) -> list[int]:
    prompt = len(stream.source.prompt)
    return stream.truth(prompt + stream.source.stopping.max_tokens)[prompt:].tolist()


@pytest.mark.parametrize("max_lease", [1, 4])
@pytest.mark.parametrize("call", range(0, 14, 2))
def test_runners_die_at_every_call(call: int, max_lease: int) -> None:
    h = make_harness(max_lease=max_lease, max_batch_tokens=8)
    h.executor.fail_at = {call, call + 1}
    streams = [h.add(9, 12, guidance=GUIDED) for _ in range(3)]
    h.run()
    h.check()
    assert all(stream.tokens == truth(h, stream) for stream in streams)


@pytest.mark.parametrize("num_host_pages", [0, 50])
def test_preemption_and_swap(num_host_pages: int) -> None:
    h = make_harness(num_pages=20, num_host_pages=num_host_pages, prefix_caching=False)
    for number in range(5):
        h.add(3, 50, guidance=Guidance(str(number)))
    h.run()
    stats = h.engine.stats()
    assert stats.preemptions and (stats.preemptions_by_swap > 0) == (num_host_pages > 0)
    h.check()


@pytest.mark.parametrize("delivered", range(0, 12, 3))
def test_another_engine_goes_on(delivered: int) -> None:
    first = make_harness()
    whole = first.add(9, 12, guidance=GUIDED)
    first.run()
    second = slow()
    moved = second.add(9, 12, guidance=GUIDED, output=whole.tokens[:delivered], deaths=1)
    second.run()
    second.check()
    assert moved.waited and moved.tokens == whole.tokens


def test_the_toy_needs_its_grammar() -> None:
    h = make_harness()
    source = h.add([1, 2, 3], 12, guidance=Guidance("a")).source
    tokens = []
    for guidance in (None, Guidance("a"), Guidance("b")):
        other = replace(source, parts=() if guidance is None else (guidance,))
        tokens.append(truth(h, Stream(other, h.config.vocab_size)))
    h.run()
    assert h.streams["a", 0].tokens == tokens[1]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]

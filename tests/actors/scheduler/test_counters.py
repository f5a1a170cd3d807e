"""What an engine counts of its requests, by the fake runner's clock."""

import pytest

from harness import make_harness
from rayfin.actors.errors import ContextLengthExceeded, Overloaded, RayfinError, RequestHandedBack
from rayfin.actors.media.part import MediaUsage
from rayfin.actors.metrics.engine_stats import ENGINE_HISTOGRAMS, EngineStats

R, P, T = 4, 11, 7  # requests, one after the other; tokens of each prompt and each output


def counts(stats: EngineStats) -> dict[str, int]:
    return {name: own.count for name, own in stats.histograms.items()}


def sums(stats: EngineStats) -> dict[str, float]:
    return {name: own.sum for name, own in stats.histograms.items()}


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
@pytest.mark.parametrize("max_lease", [1, 4])
def test_requests_one_after_the_other(scheduler: str, max_lease: int) -> None:
    """The acceptance numbers: a step's tokens are the prompt's that it ran and its samples."""
    h = make_harness(
        scheduler=scheduler, max_lease=max_lease, step_seconds=0.25, prefix_caching=False
    )
    for _ in range(R):
        h.add(P, T)
        h.run()
    stats = h.engine.stats()
    assert set(stats.histograms) == {family.name for family in ENGINE_HISTOGRAMS}
    for name, count in counts(stats).items():
        if name.startswith(("grammar_", "image_", "adapter_")):
            assert count == 0
        elif name != "step_transport_seconds":  # once for a lease
            assert count == (R * T if name == "iteration_tokens_total" else R), name
    assert stats.steps == R * T and stats.step_seconds == R * T * 0.25
    found = sums(stats)
    assert found["iteration_tokens_total"] == R * (P + T)
    assert found["request_prompt_tokens"] == stats.prompt_tokens == R * P
    assert found["request_generation_tokens"] == stats.generation_tokens == R * T
    assert found["request_params_max_tokens"] == R * T
    assert found["request_prefill_kv_computed_tokens"] == stats.tokens_computed == R * P
    assert found["request_num_preemptions"] == stats.tokens_cached == 0
    assert found["request_inference_time_seconds"] == pytest.approx(
        found["request_prefill_time_seconds"] + found["request_decode_time_seconds"]
    )
    assert stats.finished == {"length": R} and not stats.failed and not stats.rejected
    assert stats.running == stats.waiting == stats.deferred == 0


def test_chunks_of_a_prompt_count_where_they_are_computed() -> None:
    h = make_harness(max_batch_tokens=4, step_seconds=0.5)
    h.add(10, 2)
    h.run()
    iteration = h.engine.stats().histograms["iteration_tokens_total"]
    # 4, 4, 2 + the first token, the second token
    assert iteration.count == 4 and iteration.sum == 10 + 2
    assert iteration.cumulative((1.0, 8.0)) == [(1.0, 1), (8.0, 4), (float("inf"), 4)]


def test_phases_follow_one_another() -> None:
    """The second request waits for the first one's slot."""
    h = make_harness(max_decoding_batch=1, step_seconds=0.5, steps_in_flight=1)
    for _ in range(2):
        h.add(4, 4)
    h.run()
    found = sums(h.engine.stats())
    assert found["request_queue_time_seconds"] == 2.0  # four steps of the other
    assert found["request_prefill_time_seconds"] == 2 * 0.5
    assert found["request_decode_time_seconds"] == 2 * 1.5
    assert found["request_time_per_output_token_seconds"] == 2 * 0.5


def test_what_the_cache_saves() -> None:
    h = make_harness()
    prompt = list(range(10))
    for _ in range(2):
        h.add(prompt, 3)
        h.run()
    stats = h.engine.stats()
    assert (stats.tokens_computed, stats.tokens_cached) == (10 + 2, 8)
    assert sums(stats)["request_prefill_kv_computed_tokens"] == 12
    assert sums(stats)["iteration_tokens_total"] == 12 + 2 * 3
    assert stats.pages_cached == h.engine.lifecycle.state.tables.num_cached > 0 == stats.evictions
    for _ in range(6):  # others take all pages
        h.add(70, 8)
        h.run()
    assert h.engine.stats().evictions > 0


def test_preemptions_are_counted_with_their_requests() -> None:
    h = make_harness(num_pages=12)
    for _ in range(3):
        h.add(9, 16)
    h.run()
    h.check()
    stats = h.engine.stats()
    assert sums(stats)["request_num_preemptions"] == stats.preemptions > 0
    assert counts(stats)["request_queue_time_seconds"] == 3  # of the first admissions
    assert counts(stats)["request_prefill_time_seconds"] == 3


def test_what_does_not_finish_has_no_decode_time() -> None:
    h = make_harness(max_decoding_batch=1)
    running, waiting = h.add(4, 20), h.add(4, 20)
    for _ in range(3):
        h.step()
    assert (h.engine.stats().running, h.engine.stats().waiting) == (1, 1)
    h.abort(waiting)
    h.abort(running)
    h.run()
    stats = h.engine.stats()
    assert stats.running == stats.waiting == stats.waiting_tokens == 0
    found = counts(stats)
    assert found["request_prompt_tokens"] == 2 and found["request_queue_time_seconds"] == 1
    assert found["request_decode_time_seconds"] == found["request_inference_time_seconds"] == 0
    assert stats.finished == {"abort": 2}


def test_who_is_refused_and_why() -> None:
    h = make_harness(max_waiting_requests=1)

    def refuse(kind: type[RayfinError], prompt: int = 4) -> None:
        with pytest.raises(kind):
            h.add(prompt, 4)

    refuse(ContextLengthExceeded, 1000)
    h.add(4, 4)
    refuse(Overloaded)
    refuse(Overloaded)
    h.engine.drain()
    refuse(RequestHandedBack)
    h.run()
    assert h.engine.stats().rejected == {"invalid": 1, "queue_full": 2, "draining": 1}


def test_who_fails_and_who_is_moved() -> None:
    h = make_harness()
    failing = h.add(4, 8)
    h.executor.errors.add((failing.seed, 2))
    h.add(4, 8, timeout=0.0001)
    h.executor.clock += 1.0
    h.run()
    moved = h.add(4, 8)
    h.step()
    h.read(h.engine.fail_all(RequestHandedBack("this engine stops")))
    assert moved.ended is not None and moved.ended.finish_reason == "error"
    stats = h.engine.stats()
    assert stats.failed == {"engine_error": 1, "deadline_exceeded": 1}
    assert stats.finished == {"error": 2, "moved": 1}
    assert counts(stats)["request_prompt_tokens"] == 2  # that one goes on elsewhere


def test_new_runners_are_counted() -> None:
    h = make_harness()
    h.add(4, 6)
    h.step()
    before = h.engine.stats()
    h.executor.fail_at = {h.executor.num_run}
    h.run()
    stats = h.engine.stats()
    assert (before.runner_restarts, stats.runner_restarts) == (0, 1)
    assert before.incarnation == stats.incarnation != make_harness().engine.stats().incarnation
    assert stats.suspects == stats.deferred == 0


def test_images_are_counted() -> None:
    h = make_harness()
    counters = h.engine.lifecycle.state.counters
    counters.images(MediaUsage(num_bytes=100, seconds=(0.2, 0.3)))
    counters.images(MediaUsage(num_bytes=60, hits=3, evictions=1, seconds=(0.1,)))
    stats = h.engine.stats()
    assert (stats.image_cache_bytes, stats.image_cache_hits) == (60, 3)
    assert (stats.images_encoded, stats.image_cache_evictions) == (3, 1)
    assert counts(stats)["image_encode_seconds"] == 3


def test_drafts_that_hold_are_counted_in_a_step() -> None:
    """Also where the steps of a call have different numbers of tokens."""
    h = make_harness(num_speculative_tokens=3, max_lease=4, step_seconds=0.0001)
    h.executor.share_right = 0.5
    streams = [h.add(10 + number, 23) for number in range(3)]
    h.run()
    found = sums(h.engine.stats())
    tokens = sum(len(stream.tokens) for stream in streams)
    assert found["iteration_tokens_total"] == 10 + 11 + 12 + tokens

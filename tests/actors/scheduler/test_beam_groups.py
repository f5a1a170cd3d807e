"""Beam searches in the engine: what a group's steps look like, and that nothing disturbs it."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfin.actors.errors import ContextLengthExceeded, InvalidRequest
from rayfin.actors.messages import COPY, SAMPLED_LAST_STEP, BeamParams
from rayfin.actors.scheduler.beam_groups import assign

Make = Callable[..., Any]


def _prompt(length: int) -> list[int]:
    return [(11 * i + i * i // 5) % 50 for i in range(length)]


def _found(stream: Any) -> list[list[int]]:
    return [own.tokens for own in stream.ended.hypotheses]


@given(
    case=st.integers(1, 8).flatmap(
        lambda beams: st.tuples(
            st.just(beams),
            st.integers(0, 4),
            st.lists(st.integers(0, beams - 1), min_size=1, max_size=8),
        )
    )
)
def test_assign(case: tuple[int, int, list[int]]) -> None:
    beams, spare, parents = case
    slots = [10 + 3 * i for i in range(beams + spare)]
    parents = parents[: len(slots)]
    assigned, forks = assign(parents, slots)
    assert sorted(assigned) == sorted(slots)
    copied = dict((target, source) for source, target in forks)
    for child, parent in zip(assigned, parents, strict=False):
        assert copied.get(child, child) == slots[parent]
    assert len(forks) == len(parents) - len(set(parents))
    assert not {target for _, target in forks} & {slots[parent] for parent in parents}


def test_a_group_runs_in_lockstep(harness: Make, scheduler: str, steps_in_flight: int) -> None:
    """The prompt once, then all beams in each step, each with a token that the scheduler names."""
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight)
    stream = h.add(_prompt(6), 5, beams=BeamParams(4))
    h.run()
    h.check()
    prompt, *steps = h.executor.log
    assert len(prompt.ids) == 1 and len(steps) == 4
    for number, step in enumerate(steps):
        assert step.decoding_batch == 4 and step.num_steps == 1
        assert step.kv_len.tolist() == [6 + number] * 4
        assert SAMPLED_LAST_STEP not in step.merge_prompt
    assert steps[0].moves[:, 0].tolist() == [COPY] * 3
    assert len(_found(stream)) == 4 and stream.tokens == []
    assert h.engine.stats().generation_tokens == sum(map(len, _found(stream)))


def test_full_pages_are_shared(harness: Make) -> None:
    h = harness(prefix_caching=False, steps_in_flight=1)
    h.add(_prompt(9), 9, beams=BeamParams(4))
    h.step()
    h.step()
    assert h.engine.lifecycle.state.tables.num_held == 2 + 4
    h.run()
    h.check()


def test_others_go_on_meanwhile(harness: Make) -> None:
    """Two steps in flight for them, while each step of the group waits for the one before."""
    h = harness(max_lease=16, step_seconds=0.0002)
    h.add(_prompt(5), 20)
    h.add(_prompt(6), 8, beams=BeamParams(3))
    h.add(_prompt(7), 20)
    h.run()
    h.check()
    sizes = [step.decoding_batch for step in h.executor.log if not step.prefill_batch]
    assert 2 in sizes and 5 in sizes
    group = [step for step in h.executor.log if step.decoding_batch == 5]
    assert all(step.num_steps == 1 for step in group)


@pytest.mark.parametrize("chunk", [3, 4, 64])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_prompts_in_chunks(harness: Make, chunk: int, page_size: int) -> None:
    h = harness(max_batch_tokens=chunk, page_size=page_size, max_decoding_batch=3, num_pages=200)
    for length in (1, 4, 9, 16):
        h.add(_prompt(length), 7, beams=BeamParams(3))
    h.run()
    h.check()


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_stops(harness: Make, scheduler: str, width: int, early_stopping: Any) -> None:
    h = harness(scheduler=scheduler, num_pages=200)
    for seed in range(8):
        beams = BeamParams(width, [1.0, 0.0, 2.0][seed % 3], early_stopping)
        h.add(_prompt(3 + seed), 12, eos=range(4), stop=range(10, 14), beams=beams)
    h.run()
    h.check()
    reasons = {own.finish_reason for s in h.streams.values() for own in s.ended.hypotheses}
    assert "stop" in reasons


def test_a_vocabulary_smaller_than_the_width(harness: Make, scheduler: str) -> None:
    h = harness(scheduler=scheduler, vocab_size=3)
    stream = h.add([1, 2, 0], 5, eos=[2], beams=BeamParams(8))
    h.run()
    h.check()
    assert len(_found(stream)) == 8
    assert {step.decoding_batch for step in h.executor.log} >= {0, 2, 4, 8}


def test_wider_than_a_step_is_refused(harness: Make) -> None:
    h = harness(max_decoding_batch=4)
    with pytest.raises(InvalidRequest) as caught:
        h.add(5, 3, beams=BeamParams(5))
    assert caught.value.param == "n" and not h.engine.has_work
    h.add(5, 3, beams=BeamParams(4))
    h.run()
    h.check()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_what_is_let_in_fits_alone(harness: Make, length: int, max_tokens: int) -> None:
    """In the smallest cache that the door lets it into, a search runs without a preemption."""
    for pages in range(1, 40):
        h = harness(num_pages=pages, max_model_len=length + max_tokens, prefix_caching=False)
        try:
            h.add(_prompt(length), max_tokens, beams=BeamParams(5))
        except ContextLengthExceeded as error:
            assert error.param == "n" and not h.engine.has_work
            continue
        h.run()
        h.check()
        assert h.engine.stats().preemptions == 0
        return
    raise AssertionError("never let in")


def test_too_long_is_refused_as_ever(harness: Make) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        harness(max_model_len=20).add(15, 6, beams=BeamParams(2))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("moment", range(7))
def test_abort(harness: Make, scheduler: str, steps_in_flight: int, moment: int) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight, max_batch_tokens=80)
    stream, other = h.add(_prompt(9), 6, beams=BeamParams(4)), h.add(_prompt(5), 9)
    for _ in range(moment):
        h.step()
    h.abort(stream)
    lifecycle = h.engine.lifecycle
    if stream.ended is None:
        assert lifecycle.state.running.num_free_slots >= 7
    again = h.add(_prompt(9), 6, beams=BeamParams(8))
    h.run()
    h.check()
    assert other.ended is not None and again.ended.hypotheses


@pytest.mark.parametrize("index", range(4))
def test_error_of_its_rows_ends_the_group(
    harness: Make, scheduler: str, steps_in_flight: int, index: int
) -> None:
    """All rows fail at once here; the request ends once, and the others go on."""
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight)
    h.executor.errors = {(0, index)}
    stream, other = h.add(_prompt(9), 6, beams=BeamParams(4)), h.add(_prompt(9), 6)
    h.run()
    h.check()
    assert stream.ended.finish_reason == "error" and stream.ended.hypotheses == []
    assert other.ended.finish_reason == "length"


@pytest.mark.parametrize("call", range(6))
def test_restart(harness: Make, scheduler: str, steps_in_flight: int, call: int) -> None:
    h = harness(scheduler=scheduler, steps_in_flight=steps_in_flight)
    h.executor.fail_at = {call}
    h.add(_prompt(9), 5, beams=BeamParams(4))
    h.add(_prompt(5), 9)
    h.run()
    h.check()
    assert h.executor.epoch == 1


@pytest.mark.parametrize("host_pages", [0, 40])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_hits_the_whole_group(
    harness: Make, scheduler: str, steps_in_flight: int, caching: bool, host_pages: int
) -> None:
    """By an older request that grows, and by another group; each says what it would say alone."""
    h = harness(
        scheduler=scheduler,
        steps_in_flight=steps_in_flight,
        prefix_caching=caching,
        num_host_pages=host_pages,
        num_pages=14,
        max_model_len=40,
    )
    h.add(_prompt(6), 30)
    h.add(_prompt(9), 12, beams=BeamParams(3))
    h.add(_prompt(3), 9, beams=BeamParams(3))
    h.run()
    h.check()
    assert h.engine.stats().preemptions > 0


def test_a_group_waits_for_slots(harness: Make) -> None:
    """It is not overtaken, and no request is preempted for it."""
    h = harness(max_decoding_batch=4)
    h.add(_prompt(5), 9)
    h.add(_prompt(6), 5, beams=BeamParams(4))
    h.add(_prompt(7), 3)
    h.run()
    h.check()
    assert h.executor.entered[:2] == [0, 1] and h.executor.entered[-1] == 2
    assert h.engine.stats().preemptions == 0


def test_same_search_again_finds_its_prompt(harness: Make) -> None:
    h = harness()
    first = h.add(_prompt(17), 5, beams=BeamParams(4))
    h.run()
    second = h.add(_prompt(17), 5, beams=BeamParams(4))
    h.run()
    h.check()
    assert (first.ended.cached_tokens, second.ended.cached_tokens) == (0, 16)


def test_searches_that_fork_into_the_same_step_as_a_prompt(harness: Make) -> None:
    """V0 runs a prompt before it decodes: what beams have copied waits for their next rows."""
    h = harness(scheduler="v0", steps_in_flight=1)
    h.add(_prompt(6), 6, beams=BeamParams(4))
    h.step()
    h.add(_prompt(7), 4)
    h.run()
    h.check()
    assert h.executor.log[1].decoding_batch == 0 and len(h.executor.log[1].moves) == 3

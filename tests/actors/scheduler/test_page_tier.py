"""Pages of ended requests come back from a disk, and no request waits for them for long."""

from collections.abc import Callable
from typing import Any

import pytest

from fake_disk import fake_folder
from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import Command
from rayfin.actors.timing import PAGE_READ_SECONDS

Make = Callable[..., Any]
PROMPT = [(11 * i + i * i // 5) % 50 for i in range(21)]
FULL = 20  # tokens of its full pages


@pytest.fixture(params=[1, 2])
def h(harness: Make, request: pytest.FixtureRequest) -> Any:
    """An engine that has answered PROMPT, and has no page of it any more."""
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, steps_in_flight=request.param)
    h.add(PROMPT, 6)
    h.run()
    h.engine.step()  # its pages are written
    h.engine.lifecycle.forget_prefixes()
    return h


def _files(h: Any) -> dict[bytes, Any]:
    files: dict[bytes, Any] = h.config.page_folder.pages
    return files


def _waits(h: Any) -> int:
    return len(h.engine.lifecycle.tier)


def test_a_prompt_is_read(h: Any) -> None:
    """The answer's pages too, for the next turn."""
    assert len(_files(h)) == 6
    h.executor.disk_seconds = 0.2
    stream = h.add(PROMPT, 6)
    assert _waits(h) == 1 and not h.engine.has_steps
    h.run()
    h.check()
    assert stream.ended.cached_tokens == FULL
    stats = h.engine.stats()
    assert stats.disk_pages_written == 6
    assert stats.pages_read == {("disk", "arrived"): 5, ("disk", "missing"): 0}
    page = h.engine.config.page_bytes
    assert stats.page_bytes == {("disk", "read"): 5 * page, ("disk", "written"): 6 * page}
    turn = h.add([*PROMPT, *stream.tokens, 3, 4], 3)
    h.run()
    h.check()
    assert turn.ended.cached_tokens == 24


def test_what_the_device_has_is_not_read(h: Any) -> None:
    h.add(PROMPT[:13], 2)
    h.run()
    read = h.engine.stats().pages_read["disk", "arrived"]
    stream = h.add(PROMPT, 3)
    h.run()
    h.check()
    assert (read, stream.ended.cached_tokens) == (3, FULL)
    assert h.engine.stats().pages_read["disk", "arrived"] == 5


def test_requests_with_one_prompt_share_a_read(h: Any) -> None:
    h.executor.disk_seconds = 0.2
    streams = [h.add(PROMPT, 3) for _ in range(4)]
    assert _waits(h) == 4 and len(h.executor.transfers) == 1
    h.run()
    h.check()
    assert {stream.ended.cached_tokens for stream in streams} == {FULL}


def test_others_do_not_wait(h: Any) -> None:
    h.executor.disk_seconds = 1.0
    slow, other = h.add(PROMPT, 3), h.add(9, 3)
    while other.open:
        h.step()
    assert slow.open and h.executor.clock < 1.0
    h.run()
    h.check()


def test_a_disk_that_hangs_costs_seconds(h: Any) -> None:
    h.executor.disk_seconds = 1e9
    stream = h.add(PROMPT, 3)
    h.wait()
    for _ in range(200):
        h.step()
        h.wait()
    assert not stream.open and stream.ended.cached_tokens == 0
    assert PAGE_READ_SECONDS <= h.executor.clock < PAGE_READ_SECONDS + 1
    h.check()
    h.engine.check_integrity()


def test_a_read_may_take_half_of_what_computing_takes(h: Any) -> None:
    """On a slow processor a long read is worth its wait."""
    h.executor.token_seconds = 1.0
    h.add([7] * 21, 1)  # shows what a prompt costs
    h.run()
    h.engine.lifecycle.forget_prefixes()
    h.executor.disk_seconds, began = 2 * PAGE_READ_SECONDS, h.executor.clock
    stream = h.add(PROMPT, 3)
    h.run()
    assert stream.ended.cached_tokens == FULL
    assert h.executor.clock - began > 2 * PAGE_READ_SECONDS
    h.check()


@pytest.mark.parametrize("lost", range(6))
def test_a_lost_page_is_computed(h: Any, lost: int) -> None:
    hashes = list(_files(h))
    h.config.page_folder.broken.add(hashes[lost])
    stream = h.add(PROMPT, 3)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == min(4 * lost, FULL)
    assert h.engine.stats().pages_read["disk", "missing"] == max(5 - lost, 0)


def test_it_is_stored_again(h: Any) -> None:
    lost = list(_files(h))[2]
    h.config.page_folder.broken.add(lost)
    h.add(PROMPT, 3)
    h.run()
    h.engine.step()
    assert lost in _files(h)


def test_abort_and_deadline_while_it_waits(h: Any) -> None:
    h.executor.disk_seconds = 0.5
    aborted, late = h.add(PROMPT, 3), h.add(PROMPT, 3, timeout=0.1)
    h.abort(aborted)
    h.run()
    assert late.ended.error is not None and _waits(h) == 0
    h.executor.clock += 1
    h.engine.step()
    h.engine.check_integrity()
    assert h.engine.lifecycle.state.tables.pool.num_free == h.config.num_pages


def test_a_dead_runner_keeps_nothing_lent(h: Any) -> None:
    h.executor.disk_seconds = 0.5
    waits, other = h.add(PROMPT, 3), h.add(9, 3)
    h.executor.fail_at = {h.executor.num_run}
    h.run()
    h.check()
    assert not waits.open and not other.open
    h.executor.clock += 1  # their own pages are written
    h.engine.step()
    assert h.engine.lifecycle.state.tables.pool.num_free == h.config.num_pages


def test_an_operators_reset_empties_the_disk(h: Any) -> None:
    h.engine.carry_out(Command.RESET_CACHE)
    assert not _files(h)
    stream = h.add(PROMPT, 3)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 0


def test_a_reset_while_pages_come(h: Any) -> None:
    h.executor.disk_seconds = 0.5
    stream = h.add(PROMPT, 3)
    h.engine.carry_out(Command.RESET_CACHE)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 0


def test_little_is_neither_read_nor_stored(h: Any) -> None:
    tier = h.engine.lifecycle.tier
    tier.least_read_tokens, tier.least_stored_tokens = 24, 32
    before = len(_files(h))
    assert h.add(PROMPT, 3) and _waits(h) == 0
    h.add(22, 6)
    h.run()
    h.engine.step()
    assert len(_files(h)) == before


def test_other_salts_read_nothing(h: Any) -> None:
    stream = h.add(PROMPT, 3, extra_keys=("tenant",))
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 0


def test_scored_prompts_are_computed(h: Any) -> None:
    h.add(PROMPT, 3, prompt_logprobs=1)
    assert _waits(h) == 0
    h.run()
    h.check()


def test_lent_pages_hold_up_a_large_request(harness: Make) -> None:
    """It waits until they are written, without turns of the loop meanwhile."""
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, num_pages=20)
    h.executor.disk_seconds = 0.3
    h.add(PROMPT[:9], 4)
    h.run()
    large = h.add(76, 2)
    h.step()
    assert large.open and not h.engine.has_steps and h.executor.clock < 0.3
    h.run()
    h.check()


def test_an_aborted_prompt_is_not_stored(harness: Make) -> None:
    """The steps that write its pages may not have run."""
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, max_batch_tokens=8)
    stream = h.add(PROMPT, 3)
    h.step()
    h.abort(stream)
    h.run()
    h.engine.step()
    assert not _files(h)


def test_what_is_not_computed_again_is_not_stored(harness: Make) -> None:
    """A preempted request has had tokens, and ends while its prompt is on its way once more."""
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, max_batch_tokens=8)
    stream = h.add(PROMPT, 6)
    while len(stream.tokens) < 2:
        h.step()
    state = h.engine.lifecycle.state
    h.engine.lifecycle.preempt(state.running.holders()[0].slots[0])
    h.engine.carry_out(Command.RESET_CACHE)
    h.step()
    h.abort(stream)
    h.run()
    assert not _files(h)


def test_two_conversations_with_one_beginning(harness: Make) -> None:
    """Each reads its own pages behind those that it shares."""
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20)
    own = [[*PROMPT[:20], *(number for _ in range(25))] for number in (3, 4)]
    for prompt in own:
        h.add(prompt, 2)
    h.run()
    h.engine.step()
    h.engine.lifecycle.forget_prefixes()
    h.executor.disk_seconds = 0.2
    streams = [h.add(prompt, 2) for prompt in own]
    h.run()
    h.check()
    assert [stream.ended.cached_tokens for stream in streams] == [44, 44]


def test_the_beginning_of_what_is_too_long_is_stored(harness: Make) -> None:
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, num_pages=32)
    h.executor.disk_seconds = 1.0
    h.add(60, 4)
    h.run()
    h.executor.clock += 1
    h.engine.step()
    assert len(_files(h)) == 8


def test_reads_that_hang_leave_room(harness: Make) -> None:
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, num_pages=60)
    prompts = [[number] * 40 for number in range(1, 6)]
    for prompt in prompts:
        h.add(prompt, 2)
    h.run()
    h.engine.step()
    h.engine.lifecycle.forget_prefixes()
    h.executor.disk_seconds = 1e9
    streams = [h.add(prompt, 2) for prompt in prompts]
    for _ in range(400):
        h.step()
        h.wait()
    assert not any(stream.open for stream in streams)
    h.check()


def test_one_slot_is_used_at_once(harness: Make) -> None:
    """A write that goes on holds up no request that has room."""
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, max_decoding_batch=1)
    h.executor.disk_seconds = 5.0
    h.add(PROMPT, 2)
    other = h.add(9, 2)
    for _ in range(20):
        h.step()
        h.wait()
    assert not other.open and h.executor.clock < 1.0


def test_a_prompt_is_stored_before_its_answer_ends(harness: Make) -> None:
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20)
    stream = h.add(PROMPT, 30)
    while not stream.tokens:
        h.step()
    h.step()
    assert stream.open and len(_files(h)) == 5


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_after_a_death_the_prompt_is_read(harness: Make, steps_in_flight: int) -> None:
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, steps_in_flight=steps_in_flight)
    streams = [h.add([*PROMPT, number], 12) for number in range(3)]
    while min(len(stream.tokens) for stream in streams) < 5:
        h.step()
    h.executor.fail_at = {h.executor.num_run}
    h.run()
    h.check()
    stats = h.engine.stats()
    assert (stats.pages_read["disk", "arrived"], stats.pages_read["disk", "missing"]) == (5, 0)
    assert not any(stream.open for stream in streams)


def test_what_killed_a_runner_while_it_was_read_is_computed(harness: Make) -> None:
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20)
    stream = h.add(PROMPT, 12)
    while len(stream.tokens) < 3:
        h.step()
    h.executor.disk_seconds = 0.5
    h.executor.fail_at = {h.executor.num_run}
    while not _waits(h):
        h.step()
    h.engine.replace_runners(RunnerGroupFailed("the runner died"))
    assert _waits(h) == 0
    h.run()
    h.check()
    assert h.engine.stats().pages_read["disk", "arrived"] == 0


def test_after_a_sleep_the_prompt_is_read(harness: Make) -> None:
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20)
    stream = h.add(PROMPT, 12)
    while len(stream.tokens) < 3:
        h.step()
    h.engine.sleep()
    h.step()
    assert _waits(h) == 0
    h.engine.wake()
    assert _waits(h) == 1
    h.run()
    h.check()
    assert h.engine.stats().pages_read["disk", "arrived"] == 5


def test_new_requests_do_not_overtake_those_that_ran(harness: Make) -> None:
    """Or a stream would pause for the whole answer of another one."""
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20, max_decoding_batch=2)
    ran = [h.add([*PROMPT, number], 30) for number in range(2)]
    while min(len(stream.tokens) for stream in ran) < 5:
        h.step()
    late = [h.add(9 + number, 30) for number in range(2)]
    h.executor.disk_seconds = 0.3
    h.executor.fail_at = {h.executor.num_run}
    while any(stream.open for stream in ran):
        h.step()
        h.wait()
    assert not any(stream.tokens for stream in late)
    h.run()
    h.check()


def test_trials_do_not_overtake_those_that_ran(harness: Make) -> None:
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20)
    first, second = h.add(PROMPT, 30), h.add(3, 30)
    while min(len(stream.tokens) for stream in (first, second)) < 2:
        h.step()
    h.executor.disk_seconds = 0.3
    h.executor.fail_at = {h.executor.num_run}
    while not _waits(h):
        h.step()
    while second.open:
        h.step()
        h.wait()
    assert h.executor.entered[-2:] == [first.seed, second.seed]
    h.run()
    h.check()


def test_pages_are_written_once(harness: Make) -> None:
    h = harness(page_folder=fake_folder(), page_bytes=1 << 20)
    h.executor.disk_seconds = 0.5
    for number in range(3):
        h.add([*PROMPT, number], 1)
    h.run()
    h.executor.clock += 1
    h.engine.step()
    assert h.engine.stats().disk_pages_written == len(_files(h))

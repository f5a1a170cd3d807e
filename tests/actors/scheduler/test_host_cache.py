"""Pages that the device's cache evicts come back from host memory, or are computed again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fake_disk import fake_folder
from rayfin.actors.messages import SWAP_OUT, Command
from rayfin.actors.weights.version import WeightVersion
from rayfin.cache.prefix_index import HashChain

Make = Callable[..., Any]
PROMPT = [(11 * i + i * i // 5) % 50 for i in range(21)]
FULL = 20  # tokens of its full pages
SMALL: dict[str, Any] = {"num_pages": 12, "max_model_len": 40, "num_offloaded_pages": 40}


@pytest.fixture(params=[1, 2])
def h(harness: Make, request: pytest.FixtureRequest) -> Any:
    """An engine that has answered PROMPT, and then so much else that the device has lost it."""
    return _evicted(harness, steps_in_flight=request.param)


def _evicted(harness: Make, **settings: Any) -> Any:
    h = harness(page_bytes=1 << 20, **{**SMALL, **settings})
    h.add(PROMPT, 6)
    h.run()
    _crowd_out(h)
    return h


def _crowd_out(h: Any) -> None:
    for _ in range(3):
        h.add(30, 3)
        h.run()
    assert h.engine.lifecycle.state.tables.index.find(_hashes(h)) == []


def _hashes(h: Any) -> list[bytes]:
    chain = HashChain(h.config.page_size)
    chain.extend(np.array(PROMPT, np.int32))
    return chain.hashes


def _host(h: Any) -> Any:
    return h.engine.lifecycle.state.host


def _read(h: Any) -> tuple[int, int]:
    stats = h.engine.stats()
    return stats.pages_read["host", "arrived"], stats.pages_read["host", "missing"]


def test_what_was_evicted_comes_back(h: Any) -> None:
    stream = h.add(PROMPT, 6)
    assert len(h.engine.lifecycle.tier) == 1 and not h.engine.has_steps
    h.run()
    h.check()
    assert stream.ended.cached_tokens == FULL and _read(h) == (5, 0)
    stats = h.engine.stats()
    assert stats.page_bytes["host", "read"] == 5 << 20 < stats.page_bytes["host", "written"]
    assert stats.pages_host == len(_host(h).index)


def test_what_makes_room_for_it_is_kept_too(h: Any) -> None:
    """Though no step carries the move: the read itself makes it, before it writes."""
    for _ in range(6):
        for tokens in (PROMPT, PROMPT[::-1]):
            stream = h.add(tokens, 6)
            h.run()
    h.check()
    assert stream.ended.cached_tokens == FULL and _read(h)[1] == 0


def test_a_page_goes_out_once(h: Any) -> None:
    """What was read from host memory is there still, unless something new took its place."""
    h.add(PROMPT, 6)
    h.run()
    before = len(h.executor.log)
    _crowd_out(h)
    moves = np.concatenate([info.moves for info in h.executor.log[before:]])
    stored = [page for kind, page, _ in moves.tolist() if kind == SWAP_OUT]
    h.add(PROMPT, 6)
    h.run()
    h.check()
    assert stored and _read(h) == (10, 0)


def test_what_was_not_used_for_longest_leaves(harness: Make) -> None:
    h = _evicted(harness, num_offloaded_pages=9)
    stream = h.add(PROMPT, 6)
    h.run()
    h.check()
    assert stream.ended.cached_tokens < FULL
    assert len(_host(h).index) <= 9


def test_host_pages_stay_while_they_are_read(h: Any) -> None:
    h.executor.disk_seconds = 0.5
    stream = h.add(PROMPT, 6)
    while h.executor.clock < 0.4:
        h.executor.clock += 0.1
        h.add(30, 3)
        for _ in range(4):
            h.step()
    h.run()
    h.check()
    assert stream.ended.cached_tokens == FULL


@pytest.mark.parametrize("what", ["reset", "sleep", "weights", "death"])
def test_when_it_is_forgotten(h: Any, what: str) -> None:
    match what:
        case "reset":
            h.engine.carry_out(Command.RESET_CACHE)
        case "sleep":
            h.engine.sleep()
            h.engine.wake()
        case "weights":
            version = WeightVersion(1, "1", "1" * 64, "/nowhere")
            h.engine.updates.pause("wait", "wait")
            h.engine.step()
            h.engine.updates.commit(version, in_place=True, pages="recompute")
            h.engine.updates.resume()
        case "death":
            h.executor.fail_at = {h.executor.num_run}
            h.add(3, 2)
            h.run()
    assert len(_host(h).index) == 0 or what == "death"
    stream = h.add(PROMPT, 6)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 0 and _read(h)[0] == 0


def test_a_scheduler_that_takes_over_begins_with_none(h: Any) -> None:
    h.lose_scheduler()
    stream = h.add(PROMPT, 6)
    h.run()
    _crowd_out(h)
    again = h.add(PROMPT, 6)
    h.run()
    h.check()
    assert (stream.ended.cached_tokens, again.ended.cached_tokens) == (0, FULL)


def test_what_a_runner_lacks_is_computed_and_not_asked_for_again(h: Any) -> None:
    h.executor.names.turn()
    stream = h.add(PROMPT, 6)
    h.run()
    assert (stream.ended.cached_tokens, _read(h)) == (0, (0, 5))
    h.engine.lifecycle.forget_prefixes()
    h.add(PROMPT, 6)
    h.run()
    h.check()
    assert _read(h) == (0, 5)
    _host(h).check_integrity()


def test_the_rest_comes_from_elsewhere(harness: Make) -> None:
    """From a disk, say, behind what host memory has."""
    h = _evicted(harness, num_offloaded_pages=40, page_folder=fake_folder())
    index = _host(h).index
    lost = [index.page(page_hash) for page_hash in _hashes(h)[3:]]
    for page in lost:
        _host(h).lend([page])
        index.drop(page)
        _host(h).give_back([page])
    stream = h.add(PROMPT, 6)
    h.run()
    h.check()
    stats = h.engine.stats()
    assert stream.ended.cached_tokens == FULL
    assert (stats.pages_read["host", "arrived"], stats.pages_read["disk", "arrived"]) == (3, 2)


def test_swapped_requests_share_the_memory(harness: Make) -> None:
    h = harness(
        num_host_pages=4, page_bytes=1 << 20, scheduler="v0", **{**SMALL, "num_offloaded_pages": 4}
    )
    for _ in range(6):
        h.add(20, 16)
    h.run()
    h.check()
    stats = h.engine.stats()
    assert stats.preemptions_by_swap > 0 and stats.host_pages_held == 0
    _host(h).check_integrity()

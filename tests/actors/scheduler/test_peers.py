"""Pages of a prompt come from the engine that has them, and no wait is longer than computing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fake_disk import fake_folder
from rayfin.actors.messages import PagesAt
from rayfin.actors.scheduler.page_tier import request_to_warm
from rayfin.actors.timing import PAGE_READ_SECONDS, PEER_SILENCE_SECONDS

Make = Callable[..., Any]
PROMPT = [(11 * i + i * i // 5) % 50 for i in range(21)]
THERE = PagesAt("other", 5)


@pytest.fixture(params=[1, 2])
def h(harness: Make, request: pytest.FixtureRequest) -> Any:
    """An engine that has nothing of PROMPT, which another one has answered."""
    return _pair(harness, steps_in_flight=request.param)


def _pair(harness: Make, **settings: Any) -> Any:
    h = harness(kv_peers=True, page_bytes=1 << 20, **settings)
    h.add(PROMPT, 6)
    h.run()
    h.executor.share_pages("other")
    h.engine.lifecycle.forget_prefixes()
    return h


def _pages(h: Any) -> dict[bytes, Any]:
    pages: dict[bytes, Any] = h.executor.peers["other"].pages
    return pages


def _read(h: Any) -> tuple[int, int]:
    stats = h.engine.stats()
    return stats.pages_read["p2p", "arrived"], stats.pages_read["p2p", "missing"]


def test_a_prompt_is_read(h: Any) -> None:
    h.executor.disk_seconds = 0.2
    stream = h.add(PROMPT, 6, pages_at=THERE)
    assert len(h.engine.lifecycle.tier) == 1 and not h.engine.has_steps
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 20 and _read(h) == (5, 0)


def test_what_was_read_can_be_read_here(h: Any) -> None:
    """It has names, with the step that follows."""
    h.add(PROMPT, 6, pages_at=THERE)
    h.run()
    h.lose_scheduler()
    stream = h.add(PROMPT, 6)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 20


def test_a_scheduler_that_dies_amid_a_read(h: Any) -> None:
    """The next one computes the prompt, keeps nothing lent, and what comes late is not taken."""
    h.executor.disk_seconds = 0.2
    stream = h.add(PROMPT, 6, pages_at=THERE)
    assert len(h.engine.lifecycle.tier) == 1
    h.lose_scheduler()
    assert h.engine.lifecycle.state.tables.pool.num_free == h.config.num_pages
    h.run()
    h.check()
    assert stream.ended.error is None and stream.ended.cached_tokens in (0, 20)
    h.executor.check_names()


@pytest.mark.parametrize(
    "hint", [None, PagesAt("gone", 5), PagesAt("other", 0), PagesAt("other", 1000)]
)
def test_hints_that_are_wrong(h: Any, hint: PagesAt | None) -> None:
    stream = h.add(PROMPT, 3, pages_at=hint)
    h.run()
    h.check()
    read = hint is not None and hint.pages == 1000
    assert stream.ended.cached_tokens == (20 if read else 0)


@pytest.mark.parametrize("lost", range(5))
def test_a_page_that_is_missing_ends_the_read(h: Any, lost: int) -> None:
    """The rest is computed, and not asked for again."""
    del _pages(h)[list(_pages(h))[lost]]
    stream = h.add(PROMPT, 3, pages_at=THERE)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 4 * lost and _read(h) == (lost, 5 - lost)


def test_an_engine_without_them_is_left_alone(h: Any) -> None:
    pages = dict(_pages(h))
    _pages(h).clear()
    for count, pause in ((1, 0.0), (1, 1.0), (2, PEER_SILENCE_SECONDS), (2, PEER_SILENCE_SECONDS)):
        h.executor.clock += pause
        h.add(PROMPT, 2, pages_at=THERE)
        h.run()
        h.engine.lifecycle.forget_prefixes()
        assert _read(h) == (0, 5 * count)
    h.executor.clock += 2 * PEER_SILENCE_SECONDS
    _pages(h).update(pages)
    h.add(PROMPT, 2, pages_at=THERE)
    h.run()
    h.check()
    assert _read(h) == (5, 10)


def test_a_wait_ends_when_computing_would_have_ended(h: Any) -> None:
    """M3, with an engine that hangs."""
    h.executor.token_seconds = 0.01
    h.add([7] * 21, 1)  # shows what a prompt costs
    h.run()
    h.engine.lifecycle.forget_prefixes()
    h.executor.disk_seconds, began = 1e9, h.executor.clock
    stream = h.add(PROMPT, 1, pages_at=THERE)
    while stream.open:
        h.step()
        h.wait()
    assert h.executor.clock - began <= 2 * 21 * 0.01 + 0.1
    h.check()


def test_what_is_computed_sooner_is_not_asked_for(h: Any) -> None:
    h.executor.token_seconds = 0.0001
    h.add([7] * 21, 1)
    h.run()
    h.engine.lifecycle.forget_prefixes()
    h.add(PROMPT, 3, pages_at=THERE)
    h.run()
    assert _read(h) == (0, 0)


def test_a_slow_engine_is_asked_again_when_time_has_passed(h: Any) -> None:
    tier = h.engine.lifecycle.tier
    h.executor.token_seconds = 0.1
    h.add([7] * 21, 1)
    h.run()
    h.engine.lifecycle.forget_prefixes()
    source = tier._source("other")
    source.seconds_per_byte, source.measured = 1e-6, h.executor.clock
    h.add(PROMPT, 1, pages_at=THERE)
    h.run()
    assert _read(h) == (0, 0)
    h.engine.lifecycle.forget_prefixes()
    h.executor.clock += 600
    h.add(PROMPT, 1, pages_at=THERE)
    h.run()
    h.check()
    assert _read(h) == (5, 0)


def test_a_slow_engine_is_soon_left_alone(h: Any) -> None:
    """One that gives something each time, but later than a prompt is computed."""
    h.executor.token_seconds = 0.2
    h.add([7] * 21, 1)
    h.run()
    h.executor.disk_seconds = 3.5
    for _ in range(4):
        h.engine.lifecycle.forget_prefixes()
        h.add(PROMPT, 1, pages_at=THERE)
        h.run()
        while h.executor.next_prepared < 1e9:  # a read may go on
            h.executor.clock += 0.5
            h.engine.step()
    h.check()
    assert _read(h)[0] <= 10


def test_few_pages_of_many_have_to_pay_alone(h: Any) -> None:
    """As many as a slow engine may give in time; what is not read is computed anyway."""
    tier = h.engine.lifecycle.tier
    assert tier._pays("other", 0, 2)
    h.executor.token_seconds = 0.01
    h.add([7] * 21, 1)
    h.run()
    source = tier._source("other")
    source.seconds_per_byte, source.measured = 0.03 / (1 << 20), h.executor.clock
    assert not tier._pays("other", 0, 2) and not tier._pays("other", 0, 5)
    source.seconds_per_byte = 0.01 / (1 << 20)
    assert tier._pays("other", 0, 5)


def test_what_comes_from_an_engine_has_no_file(harness: Make) -> None:
    """On this machine; it gets one, as what is computed does."""
    h = _pair(harness, page_folder=fake_folder())
    files = h.config.page_folder.pages
    files.clear()
    h.add(PROMPT, 6, pages_at=THERE)
    h.run()
    h.engine.step()
    h.check()
    assert _read(h) == (5, 0) and len(files) == 6


def test_an_engine_that_knows_no_times_waits_two_seconds(h: Any) -> None:
    h.executor.disk_seconds = 1e9
    stream = h.add(PROMPT, 1, pages_at=THERE)
    while stream.open:
        h.step()
        h.wait()
    assert PAGE_READ_SECONDS <= h.executor.clock < PAGE_READ_SECONDS + 1


def test_the_disk_is_asked_first(harness: Make) -> None:
    h = _pair(harness, page_folder=fake_folder())
    h.add(PROMPT, 3, pages_at=THERE)
    h.run()
    h.check()
    assert h.engine.stats().pages_read["disk", "arrived"] == 5 and _read(h) == (0, 0)


def test_without_peers_no_hint_counts(harness: Make) -> None:
    h = harness()
    h.add(PROMPT, 6, pages_at=THERE)
    h.run()
    h.check()
    assert _read(h) == (0, 0)


def test_new_weights_have_other_pages(h: Any) -> None:
    h.executor.digest = "other weights"
    stream = h.add(PROMPT, 3, pages_at=THERE)
    h.run()
    assert stream.ended.cached_tokens == 0


def _warm(h: Any, tokens: list[int], pages: int = 5) -> list[int]:
    """What arrived, by the end of the next steps."""
    answers: list[int] = []
    request = request_to_warm(np.array(tokens, np.int32), (), PagesAt("other", pages), 4)
    h.engine.lifecycle.tier.warm(request, answers.append)
    while not answers and h.engine.lifecycle.tier.is_busy:
        h.step()
        h.executor.clock += 0.01
    h.step()
    return answers


def test_pages_are_read_ahead_of_their_request(h: Any) -> None:
    """No request is here meanwhile, and nothing is computed."""
    assert _warm(h, PROMPT) == [5]
    assert not h.engine.has_work and h.engine.lifecycle.num_beside == 0
    assert _warm(h, PROMPT) == [5] and _read(h) == (5, 0)
    stream = h.add(PROMPT, 6)
    h.run()
    h.check()
    assert stream.ended.cached_tokens == 20


def test_other_threads_may_ask_meanwhile(h: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a heartbeat, say, which no client would forgive."""
    transfer, seen = h.executor.transfer, list[int]()

    def send(what: Any) -> Any:
        stats = h.engine.stats()
        seen.append(stats.waiting + stats.requests_reading)
        return transfer(what)

    monkeypatch.setattr(h.executor, "transfer", send)
    assert _warm(h, PROMPT) == [5] and set(seen) == {0}


def test_a_stream_that_moves_computes_its_tail(h: Any) -> None:
    """M8: its output is read as well as its prompt."""
    stream = h.add(PROMPT, 12)
    while len(stream.tokens) < 9:
        h.step()
    h.executor.share_pages("other")
    h.engine.lifecycle.forget_prefixes()
    assert _warm(h, [*PROMPT, *stream.tokens], 7)[0] >= 6
    h.move(stream)
    h.run()
    h.check()
    assert stream.ended.cached_tokens >= 24


@pytest.mark.parametrize("why", ["gone", "restart", "no peers"])
def test_what_does_not_come_is_said(harness: Make, h: Any, why: str) -> None:
    if why == "no peers":
        h = harness()
    elif why == "gone":
        _pages(h).clear()
    else:
        h.executor.disk_seconds = 1e9
        answers: list[int] = []
        request = request_to_warm(np.array(PROMPT, np.int32), (), THERE, 4)
        h.engine.lifecycle.tier.warm(request, answers.append)
        h.engine.lifecycle.restart()
        assert answers == [0]
        return
    assert _warm(h, PROMPT) == [0]


def test_the_pages_of_the_last_request_have_names(h: Any) -> None:
    """No step follows that would bring them."""
    stream = h.add([9] * 21, 12)
    h.run()
    h.executor.share_pages("other")
    named = {name.tokens for name in h.executor.names.all().values()}
    whole = np.array([9] * 21 + stream.tokens[:-1], np.int32)
    assert {whole[at : at + 4].tobytes() for at in range(0, 32, 4)} <= named
    h.executor.check_names()
    h.check()

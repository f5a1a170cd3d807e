"""Snapshots of a running engine: they add up, and taking one changes nothing."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.metrics.engine_stats import CACHE_LABELS
from rayfin.actors.metrics.snapshot import FREE, KEPT, SHARED, EngineSnapshot
from rayfin.actors.scheduler.inbox import EngineCall
from rayfin.actors.scheduler.stats import MOST_SHOWN

Make = Callable[..., Any]


def owners(own: EngineSnapshot) -> Counter[int]:
    counts: Counter[int] = Counter()
    for owner, count in own.pages.map:
        counts[owner] += count
    return counts


def test_who_runs_and_who_waits(harness: Make) -> None:
    h = harness(max_decoding_batch=2)
    for length in (10, 6, 5):
        h.add(length, 8)
    h.step()
    own = h.engine.snapshot("one")
    assert [(view.id, view.prompt, view.output) for view in own.running] == [(0, 10, 1), (1, 6, 1)]
    assert [view.pages for view in own.running] == [3, 2]
    assert [(view.id, view.prompt) for view in own.waiting] == [(2, 5)]
    assert (own.num_running, own.num_waiting, own.name) == (2, 1, "one")
    assert own.step.prefill_tokens == 16 and own.step.prefill_rows == 2 and own.step.decode == 0
    assert owners(own) == {0: 3, 1: 2, FREE: 64 - 5}
    h.run()
    h.check()


def test_shared_and_kept_pages(harness: Make) -> None:
    h = harness()
    prompt = list(range(17))
    h.add(prompt, 1)
    h.run()
    assert owners(h.engine.snapshot("one")) == {KEPT: 4, FREE: 60}
    for _ in range(3):
        h.add(prompt, 6)
    h.step()
    own = h.engine.snapshot("one")
    assert owners(own) == {SHARED: 4, 0: 1, 1: 1, 2: 1, FREE: 57}
    assert [view.cached for view in own.running] == [16, 16, 16]
    h.run()
    h.check()


def test_it_changes_nothing(harness: Make, scheduler: str) -> None:
    """The same steps and tokens with a snapshot after every step as without."""
    logs = []
    for watched in (False, True):
        h = harness(scheduler=scheduler, num_pages=20)
        for length in (9, 17, 4, 30, 12):
            h.add(length, 20)
        while h.engine.has_work:
            h.step()
            if watched:
                assert sum(owners(h.engine.snapshot("one")).values()) == 20
        h.check()
        logs.append([(info.ids.tolist(), info.chunk_len.tolist()) for info in h.executor.log])
    assert logs[0] == logs[1]


def test_no_more_are_shown_than_a_page_holds(harness: Make) -> None:
    many = MOST_SHOWN + 20
    h = harness(
        max_decoding_batch=many, max_prefill_batch=many, num_pages=256, max_batch_tokens=999
    )
    for _ in range(2 * many):
        h.add(3, 4)
    h.step()
    own = h.engine.snapshot("one")
    assert len(own.running) == len(own.waiting) == MOST_SHOWN
    assert (own.num_running, own.num_waiting) == (many, many)
    assert owners(own)[SHARED] == 20  # of those that are not named
    h.run()
    h.check()


def test_a_question_that_goes_wrong_is_its_askers(harness: Make) -> None:
    """A failing snapshot does not stop the loop."""
    engine = harness().engine
    wrong, right = EngineCall(lambda own: 1 / 0), EngineCall(lambda own: own.stats().steps)
    wrong.reply(engine)
    right.reply(engine)
    assert right.answer.result(0) == 0
    with pytest.raises(ZeroDivisionError):
        wrong.answer.result(0)


def test_the_cache_is_described(harness: Make) -> None:
    h = harness(num_pages=64, max_model_len=80, num_host_pages=3, kv_cache_memory=5)
    labels = dict(zip(CACHE_LABELS, h.engine.stats().cache_config, strict=True))
    assert labels == {
        "page_size": "4",
        "num_pages": "64",
        "num_pages_override": "None",
        "num_host_pages": "3",
        "size_tokens": "256",
        "max_concurrency": "3.2",
        "dtype": "auto",
        "prefix_caching": "True",
        "memory_utilization": "None",
        "memory_bytes": "5",
    }

"""Figures from times, by hand."""

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.measures import Spread, Timeline, figures, parse_limits
from rayfin.deployments.bench.report import lines

FAST = Timeline(10.0, 5, [(11.0, 1), (12.0, 2), (14.0, 1)])
SLOW = Timeline(10.5, 7, [(15.5, 1)])
BROKEN = Timeline(9.0, 3, error="refused")


def test_one_request() -> None:
    assert (FAST.tokens, FAST.ttft, FAST.e2el, FAST.tpot) == (4, 1.0, 4.0, 1.0)
    assert FAST.gaps == [1.0, 2.0]
    assert SLOW.tpot is None and SLOW.gaps == []


def test_a_run() -> None:
    run = figures([FAST, SLOW, BROKEN])
    assert (run.requests, run.failed, run.errors) == (2, 1, {"refused": 1})
    assert run.seconds == 6.5  # from the first arrival, of the broken one too, to the last token
    assert (run.prompt_tokens, run.output_tokens) == (12, 5)
    assert run.output_per_second == pytest.approx(5 / 6.5)
    assert run.ttft == Spread(3.0, 1.0, 5.0, 5.0)
    assert run.itl == Spread(1.5, 1.0, 2.0, 2.0)
    assert run.goodput is None


def test_goodput_counts_requests_within_all_limits() -> None:
    assert figures([FAST, SLOW], {"ttft": 1.0}).goodput == pytest.approx(1 / 5.5)
    assert figures([FAST, SLOW], {"ttft": 5.0, "tpot": 0.5}).goodput == pytest.approx(1 / 5.5)
    assert figures([FAST, SLOW], {"e2el": 0.1}).goodput == 0


def test_nothing_came_back() -> None:
    run = figures([BROKEN], {"ttft": 1.0})
    assert (run.requests, run.seconds, run.output_per_second, run.goodput) == (0, 0, 0, 0)
    assert run.as_json()["ttft"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert "failed 1 x: refused" in lines("serve", run)


def test_limits() -> None:
    assert parse_limits(["ttft:500", "tpot:50"]) == {"ttft": 0.5, "tpot": 0.05}
    for wrong in ("ttft", "ttft:", "ttft:-1", "itl:5", "ttft:x"):
        with pytest.raises(InvalidConfig, match="goodput"):
            parse_limits([wrong])

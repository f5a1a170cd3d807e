"""The search for the highest rate within limits: what it tries, where it ends, what it says."""

from math import inf

import pytest

from rayfin.actors.errors import InvalidConfig, ServerError
from rayfin.deployments.bench.measures import Timeline
from rayfin.deployments.bench.slo import Probes, RateSearch, parse_share
from rayfin.deployments.bench.workload import Job

LIMITS = {"ttft": 0.5}


def searched(limit: float, start: float, runs: int = 12) -> tuple[RateSearch, list[float]]:
    """A search on a server that keeps the limits up to the rate ``limit``."""
    search, tried = RateSearch(0.9, runs), []
    for rate in search.rates(start):
        tried.append(rate)
        search.record(rate, 0.95 if rate <= limit else 0.2)
    return search, tried


@pytest.mark.parametrize("start", [0.1, 1.0, 7.0, 100.0])
@pytest.mark.parametrize("limit", [0.37, 5.0, 23.0])
def test_the_rate_is_found(limit: float, start: float) -> None:
    search, tried = searched(limit, start, runs=20)
    assert search.low <= limit < search.high <= 1.1 * search.low
    assert len(tried) == len(set(tried)) == search.done


def test_the_search_doubles_then_halves_the_gap() -> None:
    search, tried = searched(5.0, 1.0)
    assert tried[:4] == [1, 2, 4, 8]
    assert tried[4] == pytest.approx(32**0.5)
    assert "5.66" not in search.line("x") and search.low < 5 < search.high


def test_runs_are_limited() -> None:
    search, tried = searched(1000, 1.0, runs=3)
    assert tried == [1, 2, 4] and search.high == inf
    assert search.line("TTFT 500 ms") == (
        "highest rate with 90 % of requests within TTFT 500 ms: 4 requests/s "
        "(no higher one was tried; 3 runs)"
    )
    search, tried = searched(0.0, 4.0, runs=2)
    assert tried == [4, 2]
    assert search.line("TTFT 500 ms") == (
        "no rate with 90 % of requests within TTFT 500 ms: 2 requests/s is too many (2 runs)"
    )
    assert "no run has ended" in RateSearch(0.9, 3).line("TTFT 500 ms")


def test_shares() -> None:
    assert parse_share("0.9") == parse_share("90") == parse_share("90%") == 0.9
    assert parse_share("1") == parse_share("100") == 1
    assert parse_share("1%") == 0.01
    for wrong in ("", "x", "0", "-1", "101", "nan"):
        with pytest.raises(InvalidConfig, match="find_rate"):
            parse_share(wrong)


class Server:
    """Answers up to 6 requests a second in time; the prompts that it has seen."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    def run(self, jobs: list[Job]) -> list[Timeline]:
        self.prompts.append(jobs[0].prompt)
        span = jobs[-1].arrival
        late = not span or (len(jobs) - 1) / span > 6
        wait = 2.0 if late else 0.1
        return [Timeline(job.arrival, 2, [(job.arrival + wait, 1)]) for job in jobs]


def jobs_at(rate: float) -> list[Job]:
    return [Job((11, 12 + index % 5), 1, index / rate) for index in range(21)]


def test_a_search_starts_at_what_the_server_does_at_its_limit() -> None:
    server, lines = Server(), []
    search = RateSearch(0.99, 10)
    probes = Probes(server, jobs_at, LIMITS, search, lines.append)  # type: ignore[arg-type]
    probes.run(inf)
    assert probes.results[0][0] == inf  # 21 requests in 2 s
    assert probes.results[1][0] == pytest.approx(10.5)
    assert 6 / 1.1 < search.low <= 6 and probes.best is not None
    assert probes.best.attainment == 1.0
    assert len(lines) == len(probes.results) and lines[0].startswith("all at once: 0.0% within")
    # no prompt is asked twice, so that no cache knows one
    assert all(a != b for a, b in zip(server.prompts, server.prompts[1:], strict=False))
    found = probes.as_json()
    assert found["highest_rate"] == search.low and found["runs"][0]["request_rate"] is None
    assert found["runs"][0]["attainment"] == 0


def test_a_server_that_answers_nothing() -> None:
    class Dead(Server):
        def run(self, jobs: list[Job]) -> list[Timeline]:
            return [Timeline(job.arrival, error="cannot connect") for job in jobs]

    probes = Probes(Dead(), jobs_at, LIMITS, RateSearch(0.9, 3), print)  # type: ignore[arg-type]
    with pytest.raises(ServerError, match="cannot connect"):
        probes.run(inf)

"""The highest request rate at which enough requests stay within their limits.

DistServe (Zhong et al., OSDI 2024) calls it goodput: the most requests a second of which 90 % (or
99 %) keep the limits of TTFT and TPOT.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any

from rayfin.actors.errors import InvalidConfig, ServerError
from rayfin.deployments.bench.client import OpenLoop
from rayfin.deployments.bench.measures import Figures, figures
from rayfin.deployments.bench.report import limits_text
from rayfin.deployments.bench.workload import Job, varied


def parse_share(text: str) -> float:
    """Parses "0.9", "90" or "90%".

    Raises:
        InvalidConfig: the text is no share of requests.
    """
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = -1.0
    if share > 1 or text.endswith("%"):
        share /= 100
    if not 0 < share <= 1:
        raise InvalidConfig(f"find_rate must be a share like 0.9 or 90%, got {text!r}", "find_rate")
    return share


@dataclass(slots=True)
class RateSearch:
    """Looks for the rate by doubling, halving and bisection.

    Attributes:
        target: share of requests that must be within their limits.
        runs: most runs.
        precision: enough, if ``high`` is no more than so many times ``low``.
        low: highest rate that kept the limits; 0: none did.
        high: lowest rate that did not; infinity: none failed.
        done: number of runs so far.
    """

    target: float
    runs: int
    precision: float = 1.1
    low: float = field(default=0.0, init=False)
    high: float = field(default=inf, init=False)
    done: int = field(default=0, init=False)

    def rates(self, start: float) -> Iterator[float]:
        """Yields rates to try; each must be answered by ``record`` before the next."""
        rate = start
        while self.done < self.runs and self.high > self.low * self.precision:
            yield rate
            if self.high == inf:
                rate = self.low * 2
            else:
                rate = sqrt(self.low * self.high) if self.low else self.high / 2

    def record(self, rate: float, attainment: float) -> None:
        """Says which share of requests kept the limits at a rate."""
        self.done += 1
        if attainment >= self.target:
            self.low = rate
        else:
            self.high = rate

    def line(self, limits: str) -> str:
        """The result in one line; ``limits`` are the limits as text."""
        share = f"{self.target * 100:g} % of requests within {limits}"
        runs = f"{self.done} run" + "s" * (self.done != 1)
        if not self.done:
            return f"no run has ended, so no rate is known with {share}"
        if not self.low:
            return f"no rate with {share}: {self.high:.3g} requests/s is too many ({runs})"
        above = "no higher one was tried" if self.high == inf else f"{self.high:.3g} is too many"
        return f"highest rate with {share}: {self.low:.3g} requests/s ({above}; {runs})"


@dataclass(slots=True)
class Probes:
    """The runs of a search against a server.

    Attributes:
        jobs_at: the jobs at a rate; infinity sends all at once.
        results: each rate with its figures, in order.
    """

    load: OpenLoop
    jobs_at: Callable[[float], list[Job]]
    limits: dict[str, float]
    search: RateSearch
    tell: Callable[[str], object]
    results: list[tuple[float, Figures]] = field(default_factory=list)

    def run(self, start: float) -> None:
        """Searches from ``start``, or if that is infinite from what the server does at its limit.

        Raises:
            ServerError: no request of all at once was answered.
        """
        if start == inf:
            start = self._at(inf).requests_per_second
            if not start:
                errors = self.results[0][1].errors
                raise ServerError(next(iter(errors), "the server gave no token"))
        for rate in self.search.rates(start):
            self.search.record(rate, self._at(rate).attainment or 0.0)

    @property
    def best(self) -> Figures | None:
        """The figures of the highest rate that kept the limits."""
        return next((run for rate, run in self.results if rate == self.search.low), None)

    def line(self) -> str:
        return self.search.line(limits_text(self.limits))

    def as_json(self) -> dict[str, Any]:
        """The result, and each run's figures; a rate of null is infinite, or unknown."""
        search = self.search
        return {
            "target": search.target,
            "highest_rate": search.low or None,
            "lowest_rate_that_is_too_many": search.high if search.high < inf else None,
            "runs": [
                {"request_rate": rate if rate < inf else None, **run.as_json()}
                for rate, run in self.results
            ],
        }

    def _at(self, rate: float) -> Figures:
        # Other tokens in each run, or the prefix cache would know all prompts of the run before.
        jobs = varied(self.jobs_at(rate), len(self.results))
        run = figures(self.load.run(jobs), self.limits)
        self.results.append((rate, run))
        name = "all at once" if rate == inf else f"{rate:.3g} requests/s"
        p99 = ", ".join(
            f"{name.upper()} p99 {value * 1000:.0f} ms"
            for name, value in (("ttft", run.ttft.p99), ("tpot", run.tpot.p99))
            if value is not None
        )
        self.tell(f"{name}: {run.attainment or 0.0:.1%} within the limits ({p99 or 'no tokens'})")
        return run

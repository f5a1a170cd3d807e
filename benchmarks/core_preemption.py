"""Preemption: throughput and waiting as the pages of the cache become fewer."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from core_clock import Outcome, Visit, make_config, poisson, random_tokens, run
from core_report import Axes, Report, middle, number, quantile

from rayfin.actors.config import EngineConfig

PAGES = (4000, 3000, 2000, 1500, 1000, 750, 500)
LONGEST = 1600  # tokens of a request


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make room, and the settings that choose it."""

    name: str
    settings: dict[str, Any]

    @property
    def is_built(self) -> bool:
        return self.settings.keys() <= {field.name for field in fields(EngineConfig)}


WAYS = [
    way
    for way in (
        Way("recompute", {}),
        Way("recompute, no prefix cache", {"prefix_caching": False}),
        Way("swap", {"preemption": "swap", "num_host_pages": 4000}),
    )
    if way.is_built
]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at random, faster than they leave; answers longer than their prompts."""

    requests: int = 200
    per_second: float = 30.0

    def visits(self) -> list[Visit]:
        random = np.random.default_rng(0)
        return [
            Visit(
                at,
                random_tokens(random, int(random.integers(200, 1000))),
                int(random.integers(200, 600)),
            )
            for at in poisson(random, self.per_second, self.requests)
        ]


def squeeze(load: Load, way: Way, pages: int) -> Outcome:
    """The load with so many pages."""
    config = make_config(max_decoding_batch=64, max_model_len=LONGEST, num_pages=pages)
    return run(replace(config, **way.settings), load.visits())


def write(report: Report, *, toy: bool = False) -> None:
    load, sizes = (Load(12), PAGES[-1:]) if toy else (Load(), PAGES)
    outcomes = {way.name: {pages: squeeze(load, way, pages) for pages in sizes} for way in WAYS}
    prompts = sum(len(visit.prompt) for visit in load.visits())
    report.heading("Preemption: fewer and fewer pages")
    report.text(f"""{load.requests} requests, {load.per_second:g} a second at random, prompts of
        200 to 1,000 tokens, 200 to 600 output tokens, at most 64 at once: with 4,000 pages all of
        these fit. *Recompute* drops the pages of the latest request and computes them again later;
        with the prefix cache, what is still there of them is found. Virtual clock, seconds.""")
    for name, by_pages in outcomes.items():
        report.heading(name[0].upper() + name[1:], 3)
        report.table(
            [
                "pages",
                "tokens/s",
                "TTFT p50",
                "TTFT p99",
                "latency p50",
                "p99",
                "preempted",
                "again",
            ],
            [
                [
                    f"{pages:,}",
                    number(out.rate),
                    *(number(quantile(out.ttft, share)) for share in (0.5, 0.99)),
                    *(number(quantile(out.latency, share)) for share in (0.5, 0.99)),
                    out.preemptions,
                    f"{max(0, out.prompt_tokens - prompts):,}",
                ]
                for pages, out in by_pages.items()
            ],
        )
    report.plot(
        "preemption",
        "Throughput by pages",
        Axes("pages", "output tokens a second"),
        {
            name: (list(sizes), [out.rate for out in by_pages.values()])
            for name, by_pages in outcomes.items()
        },
    )
    most, least = sizes[0], sizes[-1]
    plain = outcomes[WAYS[0].name]
    again = plain[least].prompt_tokens / prompts - 1
    report.text(f"""*Preempted* counts preemptions, *again* the tokens computed a second time. With
        {least / most:.0%} of the pages {WAYS[0].name} keeps
        {plain[least].rate / plain[most].rate:.0%} of the throughput: requests wait for room (the
        median first token comes after {number(middle(plain[least].ttft))} s instead of
        {number(middle(plain[most].ttft))} s), and {max(0.0, again):.0%} of the prompts' tokens are
        computed again.""")

"""Preemption: throughput and waiting with fewer and fewer pages."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from core_clock import Outcome, Visit, make_config, poisson, random_tokens, run
from core_report import Axes, Report, middle, number, quantile

PAGES = (4000, 3000, 2000, 1500, 1000, 750, 500)
LONGEST = 1600  # tokens of a request


WAYS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"num_host_pages": 4000},
    "recompute, no prefix cache": {"prefix_caching": False},
    "swap, no prefix cache": {"num_host_pages": 4000, "prefix_caching": False},
}
"""The kinds of preemption and their settings."""


@dataclass(frozen=True, slots=True)
class Load:
    """Random arrivals, faster than completions; answers are longer than prompts."""

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


def squeeze(load: Load, way: str, pages: int) -> Outcome:
    """Runs the load with this number of pages."""
    config = make_config(max_decoding_batch=64, max_model_len=LONGEST, num_pages=pages)
    return run(replace(config, **WAYS[way]), load.visits())


def write(report: Report, *, toy: bool = False) -> None:
    load, sizes = (Load(12), PAGES[-1:]) if toy else (Load(), PAGES)
    outcomes = {way: {pages: squeeze(load, way, pages) for pages in sizes} for way in WAYS}
    prompts = sum(len(visit.prompt) for visit in load.visits())
    report.heading("Preemption: fewer and fewer pages")
    report.text(f"""{load.requests} requests, {load.per_second:g} a second at random, prompts of
        200 to 1,000 tokens, 200 to 600 output tokens, at most 64 at once: with 4,000 pages all of
        these fit. *Recompute* (the default of V1) drops the pages of the latest request and
        computes them again later; with the prefix cache, what is still there of them is found.
        *Swap* brings them to host memory, of which there is enough, and back. Virtual clock,
        seconds. *Preempted* counts preemptions, *again* tokens computed a second time, *moved*
        pages on their way.""")
    for name, by_pages in outcomes.items():
        report.heading(name[0].upper() + name[1:], 3)
        report.table(
            ["pages", "tokens/s", "TTFT p50", "p99", "latency p50", "p99"]
            + ["preempted", "again", "moved"],
            [
                [
                    f"{pages:,}",
                    number(out.rate),
                    *(number(quantile(out.ttft, share)) for share in (0.5, 0.99)),
                    *(number(quantile(out.latency, share)) for share in (0.5, 0.99)),
                    out.preemptions,
                    f"{max(0, out.prompt_tokens - prompts):,}",
                    f"{out.swapped_pages:,}",
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
    plain = outcomes["recompute"]
    again = plain[least].prompt_tokens / prompts - 1
    better = [
        outcomes[way][least].rate / plain[least].rate - 1
        for way in ("swap", "recompute, no prefix cache")
    ]
    report.text(f"""With {least:,} of {most:,} pages recomputing keeps
        {plain[least].rate / plain[most].rate:.0%} of the throughput: requests wait for room (the
        median first token comes after {number(middle(plain[least].ttft))} s instead of
        {number(middle(plain[most].ttft))} s), and {max(0.0, again):.0%} of the prompts' tokens are
        computed again. There, swapping gives {better[0]:+.1%} tokens/s against it; recomputing
        without the prefix cache {better[1]:+.1%}.""")

"""Benchmarks of the core; writes docs/benchmarks/core.md with its plots.

    python benchmarks/core.py [--vllm-python PATH]       # make bench-core VLLM_PYTHON=PATH
    python benchmarks/core.py --only scheduler           # one section, printed

Plots need the extra "bench". vLLM is compared if its environment is given.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import core_scheduler
import numpy as np
from core_clock import (
    EIGHT_BILLION,
    TOKEN,
    Outcome,
    Visit,
    make_config,
    poisson,
    random_tokens,
    run,
)
from core_report import Axes, Report, middle, milliseconds, number, quantile, verdict
from hops import EXECUTOR_REQUESTS, compare_executors, executor_settings, executor_workload

from rayfin import LLM

EXECUTORS = {
    "demo": ("built-in, 2M parameters", 0.90),
    "135m": ("Llama shape, 135M, random weights", 0.97),
}
"""The model, and the minimum share of the throughput that actors must keep."""


def write_executors(report: Report, *, toy: bool = False) -> None:
    rounds, requests = (1, 2) if toy else (2, EXECUTOR_REQUESTS)
    report.heading("Actors against one process")
    report.text(f"""Offline throughput of the same engine with its runner in this process, and with
        scheduler and runner as Ray actors: {requests} requests, prompts of 50 to 400 tokens, 20 to
        120 output tokens, greedy; {rounds} rounds with new prompts, in turns.""")
    rows, verdicts = [], []
    for shape in ("demo",) if toy else EXECUTORS:
        name, minimum = EXECUTORS[shape]
        rates = compare_executors(shape, rounds, requests=requests)
        inline, ray = map(middle, rates.values())
        ratio = middle([r / i for i, r in zip(rates["inline"], rates["ray"], strict=True)])
        rows.append([name, number(inline), number(ray), f"{ratio:.3f}", f"{minimum:.2f}"])
        verdicts.append(f"{name}: {verdict(ratio >= minimum)}")
    report.table(
        ["model", "inline, tokens/s", "actors, tokens/s", "actors / inline", "at least"], rows
    )
    report.text(f"""Targets: {"; ".join(verdicts)}. `python benchmarks/hops.py executors`
        measures one of them with other threads or more rounds.""")


BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
LONG_PROMPT = 8000
STALL_BUDGETS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class VersionLoad:
    """Random arrivals: most prompts are short, every tenth is long."""

    requests: int = 300
    per_second: float = 16.0

    def visits(self) -> list[Visit]:
        random = np.random.default_rng(0)
        visits = []
        for at in poisson(random, self.per_second, self.requests):
            long = random.random() < 0.1
            length = random.integers(4000, LONG_PROMPT) if long else random.integers(50, 500)
            tokens = int(random.integers(50, 300))
            visits.append(Visit(at, random_tokens(random, int(length)), tokens))
        return visits


def sweep(load: VersionLoad, budgets: tuple[int, ...] = BUDGETS) -> dict[str, Outcome]:
    """Runs the same load under V0, and under V1 with each budget."""
    outcomes = {"V0": run(make_config(scheduler="v0"), load.visits())}
    for budget in budgets:
        outcomes[f"V1, {budget:,}"] = run(make_config(max_batch_tokens=budget), load.visits())
    return outcomes


def stalls(streams: int = 32, prompts: int = 4, tokens: int = 400) -> dict[str, Outcome]:
    """``streams`` requests decode while ``prompts`` long prompts arrive, half a second apart.

    The streams are the first visits of each outcome.
    """
    outcomes: dict[str, Outcome] = {}
    configs = {"V0": make_config(scheduler="v0")}
    configs |= {f"V1, {n:,}": make_config(max_batch_tokens=n) for n in STALL_BUDGETS}
    for name, config in configs.items():
        random = np.random.default_rng(0)
        visits = [Visit(0.0, random_tokens(random, 100), tokens) for _ in range(streams)]
        for number_ in range(prompts):
            visits.append(Visit(0.5 + 0.5 * number_, random_tokens(random, LONG_PROMPT), 2))
        outcomes[name] = run(config, visits)
    return outcomes


def write_versions(report: Report, *, toy: bool = False) -> None:
    report.heading("V0 against V1: the first token against the next ones")
    report.text("""V0 schedules requests: a step is whole prompts or decoding, never both. V1
        schedules tokens: decoding rows first, and what is left of `max_batch_tokens` for parts of
        prompts. So V1 should be able to trade the time to the first token (TTFT) against the time
        of the next ones (TPOT, and the gaps between tokens), where V0 cannot.""")
    _write_sweep(
        report, VersionLoad(30) if toy else VersionLoad(), BUDGETS[2:4] if toy else BUDGETS
    )
    _write_stalls(report, stalls(4, 1, 100) if toy else stalls())


def _write_sweep(report: Report, load: VersionLoad, budgets: tuple[int, ...]) -> None:
    outcomes = sweep(load, budgets)
    report.heading("As max_batch_tokens moves", 3)
    report.text(f"""{load.requests} requests, {load.per_second:g} a second at random; every tenth
        prompt has 4,000 to 8,000 tokens, the others 50 to 500; 50 to 300 output tokens. Virtual
        clock, milliseconds.""")
    report.table(
        ["scheduler", "TTFT p50", "TTFT p99", "TPOT p50", "gap p99", "longest gap", "tokens/s"],
        [
            [
                name,
                *(milliseconds(quantile(out.ttft, share)) for share in (0.5, 0.99)),
                milliseconds(middle(out.tpot)),
                milliseconds(quantile(out.gaps, 0.99)),
                milliseconds(max(out.gaps)),
                number(out.rate),
            ]
            for name, out in outcomes.items()
        ],
    )
    v0, curve = outcomes["V0"], [out for name, out in outcomes.items() if name != "V0"]
    report.plot(
        "versions",
        "Each point of V1 is one max_batch_tokens",
        Axes("longest gap between tokens, ms", "TTFT p99, ms", log_y=True),
        {
            name: (
                [1e3 * max(out.gaps) for out in outs],
                [1e3 * quantile(out.ttft, 0.99) for out in outs],
            )
            for name, outs in {"V1": curve, "V0": [v0]}.items()
        },
    )
    small, large = curve[0], curve[-1]
    name = min(outcomes, key=lambda each: quantile(outcomes[each].ttft, 0.99))
    report.text(f"""From {budgets[0]:,} to {budgets[-1]:,} tokens a step the longest gap goes from
        {milliseconds(max(small.gaps))} to {milliseconds(max(large.gaps))} ms and the p99 TTFT from
        {milliseconds(quantile(small.ttft, 0.99))} to {milliseconds(quantile(large.ttft, 0.99))}
        ms; V0 has one point, {milliseconds(max(v0.gaps))} and
        {milliseconds(quantile(v0.ttft, 0.99))} ms. The shortest p99 TTFT is that of {name}.""")


def _write_stalls(report: Report, outcomes: dict[str, Outcome]) -> None:
    streams = sum(visit.at == 0 for visit in outcomes["V0"].visits)
    decoding = {name: out.visits[:streams] for name, out in outcomes.items()}
    gaps = {name: [gap for v in visits for gap in v.gaps] for name, visits in decoding.items()}
    report.heading("Decoding while long prompts come in", 3)
    report.text(f"""{streams} requests decode; from 0.5 s on,
        {len(outcomes["V0"].visits) - streams} prompts of {LONG_PROMPT:,} tokens come in, half a
        second apart. Virtual clock, milliseconds.""")
    report.table(
        ["scheduler", "gap p50", "gap p99", "longest gap", "TTFT of the long prompts"],
        [
            [
                name,
                milliseconds(middle(gaps[name])),
                milliseconds(quantile(gaps[name], 0.99)),
                milliseconds(max(gaps[name])),
                milliseconds(middle([visit.ttft for visit in out.visits[streams:]])),
            ]
            for name, out in outcomes.items()
        ],
    )
    report.plot(
        "stalls",
        "Gaps between one request's tokens while long prompts come in",
        Axes("seconds", "gap, ms"),
        {
            name: (decoding[name][0].times[1:], [1e3 * gap for gap in decoding[name][0].gaps])
            for name in list(outcomes)[:3]
        },
        dots=False,
    )
    name = list(outcomes)[1]
    report.text(f"""A long prompt stops every stream of V0 for {milliseconds(max(gaps["V0"]))} ms;
        under {name} tokens a step no stream waits longer than {milliseconds(max(gaps[name]))} ms,
        and the prompt itself starts to answer {_later(outcomes, streams, name)}.""")


def _later(outcomes: dict[str, Outcome], streams: int, name: str) -> str:
    first = {key: middle([v.ttft for v in outcomes[key].visits[streams:]]) for key in ("V0", name)}
    more = first[name] / first["V0"] - 1
    return f"{abs(more):.0%} {'later' if more > 0 else 'sooner'}"


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


def write_preemption(report: Report, *, toy: bool = False) -> None:
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
    full, least = sizes[0], sizes[-1]
    plain = outcomes["recompute"]
    again = plain[least].prompt_tokens / prompts - 1
    better = [
        outcomes[way][least].rate / plain[least].rate - 1
        for way in ("swap", "recompute, no prefix cache")
    ]
    report.text(f"""With {least:,} of {full:,} pages recomputing keeps
        {plain[least].rate / plain[full].rate:.0%} of the throughput: requests wait for room (the
        median first token comes after {number(middle(plain[least].ttft))} s instead of
        {number(middle(plain[full].ttft))} s), and {max(0.0, again):.0%} of the prompts' tokens are
        computed again. There, swapping gives {better[0]:+.1%} tokens/s against it; recomputing
        without the prefix cache {better[1]:+.1%}.""")


SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)
PROMPT = 2000
CONVERSATIONS = (4, 8, 16, 32, 48, 64, 96)
TURNS, OPENING, QUESTION, ANSWER = 6, 500, 100, 100
"""Turns of a conversation, and the tokens of its start and of each turn."""

CONVERSATION_PAGES = 4000
MOST_COST = 0.01


def shared(share: float, *, caching: bool, requests: int = 200) -> Outcome:
    """Requests whose prompts share their first ``share``."""
    random = np.random.default_rng(0)
    times = poisson(random, 12, requests)
    common = random_tokens(random, round(PROMPT * share))
    visits = []
    for at in times:
        rest = random_tokens(random, PROMPT - len(common))
        visits.append(Visit(at, np.concatenate([common, rest]), 64))
    return run(make_config(prefix_caching=caching), visits)


def conversations(count: int, *, caching: bool, turns: int = TURNS) -> Outcome:
    """``count`` users with a conversation each: they read an answer for 5 s, then continue."""
    random = np.random.default_rng(0)
    turns_left: dict[int, int] = {}

    def go_on(visit: Visit) -> list[Visit]:
        left = turns_left.pop(id(visit))
        if not left:
            return []
        answer = np.full(len(visit.times), TOKEN, np.int32)
        prompt = np.concatenate([visit.prompt, answer, random_tokens(random, QUESTION)])
        another = Visit(visit.times[-1] + random.exponential(5.0), prompt, ANSWER)
        turns_left[id(another)] = left - 1
        return [another]

    starts = [
        Visit(at, random_tokens(random, OPENING + QUESTION), ANSWER)
        for at in (random.random(count) * 10.0).tolist()
    ]
    turns_left.update({id(visit): turns - 1 for visit in starts})
    config = make_config(prefix_caching=caching, num_pages=CONVERSATION_PAGES)
    return run(config, starts, then=go_on)


def hit_share(outcome: Outcome) -> float:
    """Share of the prompt tokens that were in the cache."""
    asked = sum(len(visit.prompt) for visit in outcome.visits)
    return sum(visit.cached_tokens for visit in outcome.visits) / asked


def cost(shape: str, rounds: int, requests: int) -> tuple[list[float], list[float]]:
    """Tokens per second of a real model with and without prefix caching, without common prefixes.

    Prompts are new in every round. The two take turns, and the first turn.
    """
    rates: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        common = executor_settings(shape, Path(folder)) | {"max_model_len": 1024}
        engines = {caching: LLM(prefix_caching=caching, **common) for caching in rates}
        for round_ in range(rounds + 1):  # the first round is small and warms up
            count = requests if round_ else min(8, requests)
            prompts, params = executor_workload(2000, seed=round_, requests=count)
            for caching in sorted(engines, reverse=bool(round_ % 2)):
                started = time.perf_counter()
                outputs = engines[caching].generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - started
                assert not any(output.num_cached_tokens for output in outputs)
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                rates[caching].append(tokens / seconds)
        for llm in engines.values():
            llm.close()
    return rates[True][1:], rates[False][1:]


def write_prefix(report: Report, *, toy: bool = False) -> None:
    report.heading("Prefix reuse")
    _write_shared(report, SHARES[1:3] if toy else SHARES, 8 if toy else 200)
    _write_conversations(report, CONVERSATIONS[:2] if toy else CONVERSATIONS, 2 if toy else TURNS)
    shape, rounds, requests = ("demo", 1, 2) if toy else ("135m", 8, 8)
    _write_cost(report, shape, *cost(shape, rounds, requests))


def _write_shared(report: Report, shares: tuple[float, ...], requests: int) -> None:
    outcomes = {
        share: {
            caching: shared(share, caching=caching, requests=requests) for caching in (True, False)
        }
        for share in shares
    }
    report.heading("Prompts that begin alike", 3)
    report.text(f"""{requests} requests, 12 a second at random, prompts of {PROMPT:,} tokens whose
        first part is common to all, 64 output tokens. Virtual clock.""")
    report.table(
        ["common part", "tokens computed", "without reuse", "TTFT p50, ms", "without reuse"],
        [
            [
                f"{share:.0%}",
                f"{on.prompt_tokens:,}",
                f"{off.prompt_tokens:,}",
                milliseconds(middle(on.ttft)),
                milliseconds(middle(off.ttft)),
            ]
            for share, (on, off) in ((share, both.values()) for share, both in outcomes.items())
        ],
    )
    report.plot(
        "prefix_share",
        "First token, by the part of the prompt that is common",
        Axes("common part of the prompt, %", "TTFT p50, ms"),
        {
            name: (
                [100 * share for share in shares],
                [1e3 * middle(both[caching].ttft) for both in outcomes.values()],
            )
            for name, caching in (("reuse", True), ("no reuse", False))
        },
    )
    largest = shares[-1]
    on, off = outcomes[largest].values()
    report.text(f"""At {largest:.0%} in common {1 - on.prompt_tokens / off.prompt_tokens:.0%} of the
        prompt tokens are not computed, and the first token comes
        {middle(off.ttft) / middle(on.ttft):.1f} times as soon.""")


def _write_conversations(report: Report, counts: tuple[int, ...], turns: int) -> None:
    outcomes = {
        count: {
            caching: conversations(count, caching=caching, turns=turns) for caching in (True, False)
        }
        for count in counts
    }
    length = OPENING + turns * (QUESTION + ANSWER)
    fit = CONVERSATION_PAGES * 16 // length
    report.heading("Conversations that go on", 3)
    report.text(f"""So many users at once, each with a conversation of {turns} turns that grows
        from {OPENING + QUESTION:,} to {length:,} tokens, 5 s between an answer and the next
        question. The cache has {CONVERSATION_PAGES:,} pages of 16 tokens: about {fit} whole
        conversations. Virtual clock.""")
    report.table(
        [
            "conversations",
            "tokens found",
            "tokens computed",
            "TTFT p50, ms",
            "p99",
            "no reuse, p50",
        ],
        [
            [
                count,
                f"{hit_share(on):.0%}",
                f"{on.prompt_tokens:,}",
                milliseconds(middle(on.ttft)),
                milliseconds(quantile(on.ttft, 0.99)),
                milliseconds(middle(off.ttft)),
            ]
            for count, (on, off) in ((count, both.values()) for count, both in outcomes.items())
        ],
    )
    few, many = outcomes[counts[0]][True], outcomes[counts[-1]][True]
    report.text(f"""With {counts[0]} conversations {hit_share(few):.0%} of the prompts' tokens are
        in the cache, with {counts[-1]} {hit_share(many):.0%}: pages are forgotten least recently
        used first, so conversations that do not fit push each other out.""")


def _write_cost(report: Report, shape: str, on: list[float], off: list[float]) -> None:
    ratios = [with_ / without for with_, without in zip(on, off, strict=True)]
    lost = 1 - middle(ratios)
    report.heading("What it costs where nothing is found", 3)
    report.text(f"""The same prompts, new in every round, with prefix caching on and off: a real
        model ({shape}, random weights, in this process), {len(on)} rounds that take turns.""")
    report.table(
        ["", "tokens/s, median", "rounds"],
        [
            [name, number(middle(rates)), ", ".join(number(rate) for rate in rates)]
            for name, rates in (("on", on), ("off", off))
        ],
    )
    report.text(f"""On against off, round by round: {middle(ratios):.4f} (from {min(ratios):.3f} to
        {max(ratios):.3f}); prefix caching costs {max(0.0, lost):.1%} here (target: under
        {MOST_COST:.0%}, {verdict(lost < MOST_COST)}). What it adds to the scheduler's own step is
        in the first section.""")


FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"


def machine() -> str:
    """Describes the machine."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{os.cpu_count()} cores of {name}, {platform.system()} ({platform.machine()})"


def introduction(report: Report) -> None:
    report.heading("Benchmarks of the core", 1)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "ray"))
    report.text(f"""Made by `make bench-core` (`python benchmarks/core.py`), which writes this page
        anew; one section is printed by `python benchmarks/core.py --only NAME`, with NAME one of
        {", ".join(f"`{name}`" for name in sections(None))}. Machine: {machine()}. Python
        {platform.python_version()}, {libraries}.""")
    time = EIGHT_BILLION
    report.text(f"""Sections that say *virtual clock* run the real scheduler, queues and cache
        against a formula instead of a model, so their figures are exact and the same everywhere: a
        step takes {number(1e3 * time.step)} ms, {number(1e6 * time.token)} us for each token that
        it computes, {number(1e6 * time.kv_token)} us for each token whose keys and values it
        reads, and {number(1e6 * time.move)} us for each page that it moves to host memory or back.
        That is about an 8-billion-parameter model in 16 bits on one H200. The other sections are
        measured, and move with what else the machine does.""")


def sections(vllm_python: str | None) -> dict[str, Callable[[Report], None]]:
    """The function that writes each section, by the name for ``--only``."""
    return {
        "scheduler": partial(core_scheduler.write, vllm_python=vllm_python),
        "versions": write_versions,
        "prefix": write_prefix,
        "preemption": write_preemption,
        "executors": write_executors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(sections(None)), help="print one section")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of core.md")
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("VLLM_PYTHON") or None,
        help="the Python of an environment with vLLM; default: $VLLM_PYTHON",
    )
    options = parser.parse_args()
    writers = sections(options.vllm_python)
    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            report = Report(Path(folder), draw=False)
            writers[options.only](report)
        print(report.markdown)
        return
    report = Report(options.folder)
    introduction(report)
    for name, write in writers.items():
        print(f"{name} ...", flush=True)
        write(report)
    path = options.folder / "core.md"
    path.write_text(report.markdown)
    print(path)


if __name__ == "__main__":
    main()

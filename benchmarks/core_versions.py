"""V0 against V1: latency of the first and later tokens by ``max_batch_tokens``."""

from dataclasses import dataclass

import numpy as np
from core_clock import Outcome, Visit, make_config, poisson, random_tokens, run
from core_report import Axes, Report, middle, milliseconds, number, quantile

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
LONG_PROMPT = 8000
STALL_BUDGETS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Load:
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


def sweep(load: Load, budgets: tuple[int, ...] = BUDGETS) -> dict[str, Outcome]:
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


def write(report: Report, *, toy: bool = False) -> None:
    report.heading("V0 against V1: the first token against the next ones")
    report.text("""V0 schedules requests: a step is whole prompts or decoding, never both. V1
        schedules tokens: decoding rows first, and what is left of `max_batch_tokens` for parts of
        prompts. So V1 should be able to trade the time to the first token (TTFT) against the time
        of the next ones (TPOT, and the gaps between tokens), where V0 cannot.""")
    _write_sweep(report, Load(30) if toy else Load(), BUDGETS[2:4] if toy else BUDGETS)
    _write_stalls(report, stalls(4, 1, 100) if toy else stalls())


def _write_sweep(report: Report, load: Load, budgets: tuple[int, ...]) -> None:
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

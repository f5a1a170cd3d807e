"""Prefix caching: its gain for common prefixes, and its cost without any."""

import tempfile
import time
from pathlib import Path

import numpy as np
from core_clock import TOKEN, Outcome, Visit, make_config, poisson, random_tokens, run
from core_report import Axes, Report, middle, milliseconds, number, quantile, verdict
from executors import settings, workload

from rayfin import LLM

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
        own = random_tokens(random, PROMPT - len(common))
        visits.append(Visit(at, np.concatenate([common, own]), 64))
    return run(make_config(prefix_caching=caching), visits)


def conversations(count: int, *, caching: bool, turns: int = TURNS) -> Outcome:
    """``count`` users with a conversation each: they read an answer for 5 s, then continue."""
    random = np.random.default_rng(0)
    turns_left: dict[int, int] = {}

    def go_on(visit: Visit) -> Visit | None:
        left = turns_left.pop(id(visit))
        if not left:
            return None
        answer = np.full(len(visit.times), TOKEN, np.int32)
        prompt = np.concatenate([visit.prompt, answer, random_tokens(random, QUESTION)])
        another = Visit(visit.times[-1] + random.exponential(5.0), prompt, ANSWER)
        turns_left[id(another)] = left - 1
        return another

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
        common = settings(shape, Path(folder)) | {"max_model_len": 1024}
        engines = {caching: LLM(prefix_caching=caching, **common) for caching in rates}
        for round_ in range(rounds + 1):  # the first round is small and warms up
            count = requests if round_ else min(8, requests)
            prompts, params = workload(2000, seed=round_, requests=count)
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


def write(report: Report, *, toy: bool = False) -> None:
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
    most = shares[-1]
    on, off = outcomes[most].values()
    report.text(f"""At {most:.0%} in common {1 - on.prompt_tokens / off.prompt_tokens:.0%} of the
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

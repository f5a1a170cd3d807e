"""Traces made from the published statistics of real ones, without their files.

``mooncake``: request rate, lengths, and the share of prompt tokens in the cache of the three
traces of Qin et al., "Mooncake: Trading More Storage for Less Computation — A KVCache-centric
Architecture for Serving LLM Chatbot", FAST 2025 (table 2, and the released traces).
``burst``: arrivals and lengths of Wang et al., "BurstGPT: A Real-World Workload Dataset to
Optimize LLM Serving Systems", KDD 2025 (Gamma gaps, Zipf lengths, figure of answers by prompts).
"""

import random
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import accumulate, count
from math import exp, log
from typing import Literal

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.traces import BLOCK_TOKENS, Call, Trace
from rayfin.deployments.bench.workload import arrivals

BurstModel = Literal["ChatGPT", "GPT-4"]
BurstLog = Literal["conversation", "api"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Calls of one kind: a new session's prompt, or an earlier session's with a turn more.

    Attributes:
        share: share of all calls.
        prompt: mean tokens of a prompt.
        output: mean tokens of an answer.
        cached: share of prompt tokens that stood in earlier prompts.
        spread: sigma of a new prompt's length, which is log-normal.
        output_shape: shape of an answer's length, which is gamma distributed.
        turn: mean tokens that a turn adds, the answer before it included.
        shared_blocks: blocks at the head of each prompt that all sessions of a prefix share.
        prefixes: number of such heads; the n-th is drawn with a weight of 1/n (Zipf).
        live: a turn continues one of that many last sessions.
    """

    share: float = 1.0
    prompt: int
    output: int
    cached: float
    spread: float
    output_shape: float
    turn: int = 1
    shared_blocks: int = 0
    prefixes: int = 1
    live: int = 512

    @property
    def follow(self) -> float:
        """The share of calls that continue a session, so that ``cached`` holds.

        A turn finds the whole blocks of the prompt before it, which is half a turn's growth shorter
        than a mean prompt; a new session finds its shared blocks.
        """
        shared = self.shared_blocks * BLOCK_TOKENS
        share = 0.0
        for _ in range(50):  # converges fast: the growth is a small part of a prompt
            reused = self.prompt - BLOCK_TOKENS / 2 - share * self.turn / 2
            share = min(0.95, max(0.0, (self.cached * self.prompt - shared) / (reused - shared)))
        return share

    @property
    def first(self) -> float:
        """Mean tokens of a new session's prompt, so that ``prompt`` holds."""
        grown = self.follow / (1 - self.follow) / 2  # turns before it, of a session that goes on
        return self.prompt - self.follow * self.turn * (1 + grown)


@dataclass(frozen=True, slots=True)
class Published:
    """A trace's statistics. ``burstiness`` is the gamma shape of gaps, 1 for a Poisson process."""

    requests: int
    seconds: float
    burstiness: float
    kinds: tuple[Sessions, ...]

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


# Requests, seconds, mean lengths and cache ratios are published. Spreads, turns, shares of kinds
# and the ages of sessions are measured in the released files of the first and the last one.
MOONCAKE: dict[str, Published] = {
    "conversation": Published(
        12_031,
        3537.0,
        0.35,
        (
            Sessions(
                prompt=12_035,
                output=343,
                cached=0.40,
                spread=1.05,
                output_shape=2.5,
                turn=3_500,
                shared_blocks=1,
            ),
        ),
    ),
    "toolagent": Published(
        23_608,
        3600.0,
        0.35,
        (
            Sessions(
                prompt=8_596,
                output=182,
                cached=0.59,
                spread=1.2,
                output_shape=0.6,
                turn=1_000,
                shared_blocks=9,
                prefixes=20,
            ),
        ),
    ),
    # Short chats of ShareGPT, and questions about long documents (L-Eval, LooGLE).
    "synthetic": Published(
        3_993,
        1022.0,
        1.0,
        (
            Sessions(
                share=0.35,
                prompt=500,
                output=220,
                cached=0.0,
                spread=1.3,
                output_shape=0.8,
            ),
            Sessions(
                share=0.65,
                prompt=23_307,
                output=111,
                cached=0.668,
                spread=0.6,
                output_shape=0.6,
                turn=630,
                live=64,
            ),
        ),
    ),
}


def mooncake(name: str, requests: int, *, seed: int = 0) -> Trace:
    """A trace of ``requests`` calls with the statistics of one of Mooncake's.

    A short trace has fewer hits: nothing has been seen before its first calls.
    """
    published = MOONCAKE[name]
    rng = random.Random(seed)
    times = arrivals(requests, published.rate, burstiness=published.burstiness, seed=seed)
    numbers = count()
    pools = [_Pool(kind, rng, numbers) for kind in published.kinds]
    weights = [kind.share for kind in published.kinds]
    return Trace([rng.choices(pools, weights)[0].call(at) for at in times])


class _Pool:
    """The sessions of one kind that may go on."""

    def __init__(self, kind: Sessions, rng: random.Random, numbers: "count[int]") -> None:
        self._kind = kind
        self._rng = rng
        self._numbers = numbers  # of blocks, of all kinds
        self._follow, self._first = kind.follow, kind.first
        self._live: deque[Call] = deque(maxlen=kind.live)
        heads = range(kind.prefixes)
        self._heads = [[next(numbers) for _ in range(kind.shared_blocks)] for _ in heads]
        self._weights = [1 / (place + 1) for place in heads]

    def call(self, arrival: float) -> Call:
        if self._live and self._rng.random() < self._follow:
            place = self._rng.randrange(len(self._live))
            call = self._continued(arrival, self._live[place])
            self._live[place] = call
        else:
            call = self._begun(arrival)
            self._live.append(call)
        return call

    def _begun(self, arrival: float) -> Call:
        head = self._rng.choices(self._heads, self._weights)[0]
        shared = len(head) * BLOCK_TOKENS
        mean = self._first - shared
        drawn = self._rng.lognormvariate(log(mean) - self._kind.spread**2 / 2, self._kind.spread)
        return self._filled(arrival, shared + max(1, round(drawn)), head)

    def _continued(self, arrival: float, before: Call) -> Call:
        added = max(1, round(self._rng.expovariate(1 / self._kind.turn)))
        kept = before.blocks[: before.prompt_tokens // BLOCK_TOKENS]
        return self._filled(arrival, before.prompt_tokens + added, list(kept))

    def _filled(self, arrival: float, tokens: int, kept: list[int]) -> Call:
        """A call whose prompt begins with the blocks ``kept``; the others are new."""
        new = -(-tokens // BLOCK_TOKENS) - len(kept)
        blocks = (*kept, *(next(self._numbers) for _ in range(new)))
        shape = self._kind.output_shape
        answer = max(1, round(self._rng.gammavariate(shape, self._kind.output / shape)))
        return Call(arrival, tokens, answer, blocks)


@dataclass(frozen=True, slots=True)
class BurstKind:
    """Statistics of one kind of BurstGPT's calls.

    Gaps are gamma distributed (``shape``, ``scale`` seconds, so ``shape * scale`` is their mean).
    Prompts have 1 to ``longest`` tokens, the n-th length with a weight of n ** -``zipf``. An answer
    has a mean that depends on its prompt, through ``answers``: pairs of a prompt's tokens and its
    answers' mean, with straight lines between.
    """

    shape: float
    scale: float
    zipf: float
    longest: int
    answers: tuple[tuple[int, int], ...]

    def answer(self, prompt: int) -> float:
        """Mean tokens of the answer to a prompt."""
        at = bisect_left(self.answers, (prompt, 0))
        if at in (0, len(self.answers)):
            return self.answers[min(at, len(self.answers) - 1)][1]
        (left, low), (right, high) = self.answers[at - 1 : at + 1]
        return low + (high - low) * (prompt - left) / (right - left)

    def lengths(self) -> list[float]:
        """Cumulated weights [longest] of the prompts' lengths, from 1 token."""
        return list(accumulate(exp(-self.zipf * log(n)) for n in range(1, self.longest + 1)))


# Gamma shapes and scales are those of the generator that its authors publish beside the trace.
# Exponents fit the median and the 95th percentile of prompts (353 and 1,638 tokens in the first
# conversations of the trace), and the mean of all calls, nearly all of the API (621 tokens, and
# 126 of the answer). Answers by prompts are read from the paper's figure.
BURST: dict[tuple[BurstModel, BurstLog], BurstKind] = {
    ("ChatGPT", "conversation"): BurstKind(
        0.5,
        2.0,
        0.63,
        2048,
        ((1, 100), (30, 265), (130, 150), (300, 165), (850, 260), (1500, 360), (2048, 460)),
    ),
    ("GPT-4", "conversation"): BurstKind(
        0.5,
        2.0,
        0.63,
        2048,
        ((1, 100), (30, 290), (100, 220), (300, 150), (620, 240), (1400, 310), (2048, 410)),
    ),
    ("ChatGPT", "api"): BurstKind(0.25, 2.0, 0.565, 2048, ((1, 126),)),
    ("GPT-4", "api"): BurstKind(0.25, 2.0, 0.565, 2048, ((1, 126),)),
}


def burst(
    requests: int, model: BurstModel = "ChatGPT", kind: BurstLog = "conversation", *, seed: int = 0
) -> Trace:
    """A trace with BurstGPT's bursts and lengths. Prompts share nothing, as the trace says nothing.

    Raises:
        InvalidConfig: no such kind of call.
    """
    if (model, kind) not in BURST:
        raise InvalidConfig(f"no statistics of {model}, {kind}", "burstgpt_model")
    known = BURST[model, kind]
    rng = random.Random(seed)
    rate = 1 / (known.shape * known.scale)
    times = arrivals(requests, rate, burstiness=known.shape, seed=seed)
    prompts = rng.choices(range(1, known.longest + 1), cum_weights=known.lengths(), k=requests)

    def answer(prompt: int) -> int:
        shape = 1 + prompt / 400  # answers to long prompts differ less
        return max(1, round(rng.gammavariate(shape, known.answer(prompt) / shape)))

    return Trace(
        [Call(at, prompt, answer(prompt)) for at, prompt in zip(times, prompts, strict=True)]
    )

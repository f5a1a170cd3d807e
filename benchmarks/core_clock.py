"""Runs an engine on a virtual clock, with a formula for a step's time instead of a model.

Results depend on the scheduler and the formula only: they are the same on every machine and in
every run, and take seconds to compute. Only the seconds of a scheduler's step are this machine's.
"""

import heapq
import itertools
import time as clock
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayfin.actors.config import BatchLimits, EngineConfig
from rayfin.actors.messages import (
    COPY,
    NO_TOKEN,
    EngineRequest,
    Int32Array,
    Sampling,
    SchedulerInfo,
    SessionRef,
    StepResult,
    StopRules,
)
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.timing import LOBBY_TICK_SECONDS

TOKEN = 7
"""The token that the stub always samples."""

VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step, linear in what it computes and moves."""

    step: float  # of any step: the weights are read once
    token: float  # of each token computed
    kv_token: float  # of each token whose keys and values are read
    move: float  # of each page brought to host memory or back

    def of(self, info: SchedulerInfo) -> float:
        kv_tokens = int(info.kv_len.sum()) + len(info.merge_prompt)
        return (
            self.step
            + self.token * len(info.merge_prompt)
            + self.kv_token * kv_tokens
            + self.move * num_swaps(info)
        )


EIGHT_BILLION = StepTime(step=4e-3, token=20e-6, kv_token=0.03e-6, move=42e-6)
"""About Llama-3.1-8B in 16 bits on one H200: 15 GB of weights and 128 KiB of keys and values a
token at 4.3 TB/s, 50,000 prompt tokens a second, pages of 2 MiB over PCIe at 50 GB/s."""


def num_swaps(info: SchedulerInfo) -> int:
    """Number of pages that a step moves to host memory or back."""
    return int((info.moves[:, 0] != COPY).sum())


@dataclass(slots=True)
class _Pending:
    executor: "StubExecutor"
    info: SchedulerInfo

    def result(self) -> StepResult:
        return self.executor.run(self.info)


class StubExecutor:
    """An ``Executor`` that always samples the same token and advances ``clock`` by ``time``."""

    def __init__(self, time: StepTime) -> None:
        self.epoch = 0
        self.clock = 0.0  # seconds
        self.prompt_tokens = 0  # computed, again where they are recomputed
        self.swapped_pages = 0  # moved to host memory and back
        self.seconds = 0.0  # of the thread, which are a runner's and not the scheduler's
        self._time = time

    def submit(self, info: SchedulerInfo) -> _Pending:
        return _Pending(self, info)

    def restart(self) -> None:
        raise AssertionError("the stub does not fail")

    def run(self, info: SchedulerInfo) -> StepResult:
        started = clock.thread_time()
        result = self._run(info)
        self.seconds += clock.thread_time() - started
        return result

    def _run(self, info: SchedulerInfo) -> StepResult:
        seconds = self._time.of(info)
        self.clock += seconds
        self.swapped_pages += num_swaps(info)
        self.prompt_tokens += int(info.chunk_len[info.decoding_batch :].sum())
        tokens = np.where(info.last_pos >= 0, TOKEN, NO_TOKEN).astype(np.int32)
        return StepResult(info.epoch, info.step, tokens[:, None], seconds=seconds)


@dataclass(slots=True)
class Visit:
    """One request, and the times of its tokens."""

    at: float  # seconds on the clock
    prompt: Int32Array
    max_tokens: int
    session: SessionRef | None = None
    tenant: str = ""
    times: list[float] = field(default_factory=list)  # of each token
    cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.at

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.at

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]

    @property
    def tpot(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


@dataclass(slots=True)
class Outcome:
    """The results of a run."""

    visits: list[Visit]
    seconds: float  # on the clock, to the last token
    prompt_tokens: int  # computed
    swapped_pages: int  # moved to host memory and back
    preemptions: int
    step_seconds: float  # mean of a scheduler's step, of its thread's time

    @property
    def ttft(self) -> list[float]:
        return [visit.ttft for visit in self.visits]

    @property
    def tpot(self) -> list[float]:
        return [visit.tpot for visit in self.visits]

    @property
    def latency(self) -> list[float]:
        return [visit.latency for visit in self.visits]

    @property
    def gaps(self) -> list[float]:
        return [gap for visit in self.visits for gap in visit.gaps]

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(len(visit.times) for visit in self.visits) / self.seconds


def make_config(
    *,
    max_batch_tokens: int = 2048,
    max_decoding_batch: int = 128,
    max_prefill_batch: int = 16,
    max_model_len: int = 8448,
    num_pages: int = 100_000,
    scheduler: Any = "v1",
    steps_in_flight: int = 2,
    **settings: Any,
) -> EngineConfig:
    """An engine's configuration as from ``resolve``, with one decode step per call."""
    if scheduler == "v0":
        max_batch_tokens = max(max_batch_tokens, max_model_len)
    return EngineConfig(
        limits=BatchLimits(
            max_batch_tokens=max_batch_tokens,
            max_decoding_batch=max_decoding_batch,
            max_prefill_batch=max_prefill_batch,
        ),
        max_model_len=max_model_len,
        vocab_size=VOCABULARY,
        page_size=16,
        num_pages=num_pages,
        scheduler=scheduler,
        policy="fcfs",
        max_waiting_requests=1_000_000,
        steps_in_flight=steps_in_flight,
        **settings,
    )


def make_request(key: int, prompt: Int32Array, max_tokens: int, **more: Any) -> EngineRequest:
    """A greedy request that has a stop token and ends by its length."""
    stop = frozenset([2])
    stopping = StopRules(max_tokens, stop, stop)
    return EngineRequest(str(key), prompt, Sampling(), stopping, key=key, **more)


def run(
    config: EngineConfig,
    visits: Iterable[Visit],
    *,
    time: StepTime = EIGHT_BILLION,
    then: Callable[[Visit], Iterable[Visit]] = lambda _: (),
) -> Outcome:
    """Serves all visits; ``then`` may return new visits after one has ended."""
    executor = StubExecutor(time)
    engine = Engine(config, executor, lambda: executor.clock)
    served: list[Visit] = []
    numbers = itertools.count()
    pending = [(visit.at, next(numbers), visit) for visit in visits]
    heapq.heapify(pending)
    steps, scheduling = 0, 0.0
    while pending or engine.has_work:
        if not engine.has_work:
            executor.clock = max(executor.clock, pending[0][0])
        while pending and pending[0][0] <= executor.clock:
            visit = heapq.heappop(pending)[2]
            more = {"session": visit.session, "tenant": visit.tenant}
            engine.add(make_request(len(served), visit.prompt, visit.max_tokens, **more))
            served.append(visit)
        if engine.has_work and not engine.has_steps:  # all wait for seats
            woken = executor.clock + LOBBY_TICK_SECONDS
            executor.clock = min(woken, pending[0][0]) if pending else woken
        began = clock.thread_time() - executor.seconds
        answers = engine.step()
        steps, scheduling = steps + 1, scheduling + clock.thread_time() - executor.seconds - began
        for deltas in answers.values():
            for key in deltas.keys.tolist():
                served[key].times.append(executor.clock)
            for ended in deltas.ended:
                served[ended.key].cached_tokens = ended.cached_tokens
                for another in then(served[ended.key]):
                    heapq.heappush(pending, (another.at, next(numbers), another))
    stats = engine.stats()
    return Outcome(
        served,
        executor.clock,
        executor.prompt_tokens,
        executor.swapped_pages,
        stats.preemptions,
        scheduling / max(1, steps),
    )


def random_tokens(random: np.random.Generator, length: int) -> Int32Array:
    """A random prompt, which shares no prefix with others."""
    return random.integers(3, VOCABULARY, length, dtype=np.int32)


def poisson(random: np.random.Generator, rate: float, count: int) -> list[float]:
    """Times of ``count`` arrivals, ``rate`` a second."""
    times: list[float] = np.cumsum(random.exponential(1 / rate, count)).tolist()
    return times

"""Whole lives of an engine without a model: clients, faults and a virtual clock from one seed.

    python tests/simulate.py --seeds 1000          # lives 0 .. 999
    python tests/simulate.py --seed 17             # one of them again

A life is a random configuration, workload and series of faults on a ``FakeExecutor``. Every stream
must get exactly its tokens and one end, and the pages must add up after every step.
"""

import argparse
import heapq
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rayfin.actors.config import BatchLimits, EngineConfig
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import COPY, BeamParams, EngineRequest, Sampling, StopRules
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.fake_runner import FakeExecutor, Stream

STARTS = [[(3 * i + i * i // 7) % 50 for i in range(70)], [1] * 70]
"""What prompts begin with, where they begin alike."""


class Harness:
    """An engine on a FakeExecutor, and the clients that read its streams."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = FakeExecutor(config)
        self.engine = Engine(config, self.executor)
        self.config = config
        self.streams: dict[tuple[str, int], Stream] = {}
        self.history: list[tuple[int, int]] = []  # (seed, token) as they came

    def add(
        self,
        prompt: Sequence[int] | int,
        max_tokens: int = 4,
        *,
        stop: Iterable[int] = (),
        eos: Iterable[int] = (),
        priority: int = 0,
        client: str = "a",
        key: int | None = None,
        output: Sequence[int] = (),
        extra_keys: tuple[str, ...] = (),
        sibling_of: int | None = None,
        beams: BeamParams | None = None,
    ) -> Stream:
        """Hands a request to the engine; a number is the length of a prompt of its own."""
        seed = len(self.executor.streams)
        if isinstance(prompt, int):
            prompt = [(7 * seed + i) % self.config.vocab_size for i in range(prompt)]
        source = EngineRequest(
            request_id=f"r{seed}",
            prompt=np.array(prompt, np.int32),
            sampling=Sampling(seed=seed),
            stopping=StopRules(max_tokens, frozenset(stop) | frozenset(eos), frozenset(eos)),
            client=client,
            key=seed if key is None else key,
            priority=priority,
            output=list(output),
            extra_keys=extra_keys,
            sibling_of=sibling_of,
            beams=beams,
        )
        self.engine.add(source)
        stream = Stream(source, self.config.vocab_size)
        self.executor.streams[seed] = stream
        self.streams[client, source.key] = stream
        return stream

    def abort(self, stream: Stream) -> None:
        self.engine.abort(stream.source.client, stream.source.key)
        stream.aborted = stream.aborted or stream.open
        self.engine.check_integrity()

    def step(self) -> None:
        """One step; every message goes to an open stream, at most a lease's tokens each."""
        self.read(self.engine.step())
        self.engine.check_integrity()

    def read(self, messages: dict[str, Any]) -> None:
        for client, deltas in messages.items():
            keys = deltas.keys.tolist()
            assert len(keys) == len(deltas.tokens)
            most = self.executor.log[-1].lease if self.executor.log else 0
            assert max(Counter(keys).values(), default=0) <= most
            assert keys or deltas.ended, "an empty message"
            for key, token in zip(keys, deltas.tokens.tolist(), strict=True):
                stream = self.streams[client, key]
                assert stream.open, "a token after the end"
                stream.tokens.append(token)
                self.history.append((stream.seed, token))
            for ended in deltas.ended:
                stream = self.streams[client, ended.key]
                assert stream.open, "a second end"
                stream.ended = ended

    def run(self, max_steps: int = 5000) -> None:
        """Steps until idle; then nothing may be held."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine does not get done"
        assert self.engine.lifecycle.tables.num_held == 0
        assert self.engine.step() == {}

    def expected(self, stream: Stream) -> tuple[list[int], str, int | None]:
        """(tokens, finish reason, stop reason) as the oracle has them, planted errors included."""
        if stream.source.beams is not None:
            hypotheses, steps = stream.search
            failed = any((stream.seed, index) in self.executor.errors for index in range(steps))
            return [], "error" if failed else hypotheses[0].finish_reason, None
        tokens, reason, stop = stream.outcome()
        for index in range(len(stream.source.output), len(tokens)):
            if (stream.seed, index) in self.executor.errors:
                return tokens[:index], "error", None
        return tokens, reason, stop

    def check(self) -> None:
        """Every stream got exactly its tokens, and one end unless it was aborted."""
        for stream in self.streams.values():
            tokens, reason, stop = self.expected(stream)
            if stream.aborted:
                assert stream.ended is None
                assert stream.tokens == tokens[: len(stream.tokens)]
            else:
                assert stream.ended is not None, "no end"
                assert stream.tokens == tokens
                assert (stream.ended.finish_reason, stream.ended.stop_reason) == (reason, stop)
                assert (stream.ended.error is not None) == (reason == "error")
                found = [] if stream.source.beams is None or reason == "error" else stream.search[0]
                assert stream.ended.hypotheses == found
                assert 0 <= stream.ended.cached_tokens < len(stream.source.prompt) + len(tokens)
        if self.config.policy == "fcfs":  # I10
            first_admissions = list(dict.fromkeys(self.executor.entered))
            assert first_admissions == sorted(first_admissions), "overtaken"


def make_harness(
    *,
    scheduler: Any = "v1",
    policy: Any = "fcfs",
    steps_in_flight: int = 2,
    max_batch_tokens: int = 32,
    max_decoding_batch: int = 8,
    max_prefill_batch: int = 16,
    page_size: int = 4,
    num_pages: int = 64,
    max_model_len: int = 80,
    max_waiting_requests: int = 1000,
    vocab_size: int = 50,
    prefix_caching: bool = True,
    max_lease: int = 1,
    step_seconds: float = 0.0,
    num_host_pages: int = 0,
) -> Harness:
    if scheduler == "v0":
        max_batch_tokens = max(max_batch_tokens, max_model_len)  # as resolve_limits has it
    limits = BatchLimits(
        max_batch_tokens=max_batch_tokens,
        max_decoding_batch=max_decoding_batch,
        max_prefill_batch=max_prefill_batch,
    )
    harness = Harness(
        EngineConfig(
            limits=limits,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            page_size=page_size,
            num_pages=num_pages,
            scheduler=scheduler,
            policy=policy,
            max_waiting_requests=max_waiting_requests,
            steps_in_flight=steps_in_flight,
            prefix_caching=prefix_caching,
            max_lease=max_lease,
            num_host_pages=num_host_pages,
        )
    )
    harness.executor.step_seconds = step_seconds
    return harness


class Life:
    """One seed's engine, and what happens to it when."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.harness = make_harness(**self._settings())
        self.refused = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._plan_faults()
        self._plan_requests()

    def run(self) -> None:
        """The whole life.

        Raises:
            AssertionError: something was not as it must be.
        """
        harness, executor = self.harness, self.harness.executor
        while self._events or harness.engine.has_work:
            if not harness.engine.has_work:
                executor.clock = max(executor.clock, self._events[0][0])
            while self._events and self._events[0][0] <= executor.clock:
                heapq.heappop(self._events)[2]()
            harness.step()
            assert executor.num_submitted < 20_000, "the engine does not get done"
        harness.run()
        harness.check()

    def _settings(self) -> dict[str, Any]:
        draw = self.random
        self.model_len = draw.randint(8, 70)
        self.outgrows = draw.random() < 0.4  # short prompts, long outputs: pages run out
        page_size, rows = draw.choice([1, 2, 3, 4, 8, 16]), draw.randint(1, 8)
        pages_of_one = -(-self.model_len // page_size)
        return {
            "scheduler": draw.choice(["v0", "v1", "v1"]),
            "policy": draw.choice(["fcfs", "priority"]),
            "steps_in_flight": draw.randint(1, 2),
            "page_size": page_size,
            "num_pages": pages_of_one + draw.randint(0, draw.choice([2, 3 * pages_of_one])),
            "max_model_len": self.model_len,
            "max_decoding_batch": rows,
            "max_batch_tokens": draw.randint(rows, 64),
            "max_prefill_batch": draw.randint(1, 4),
            "vocab_size": draw.choice([3, 50]),
            "prefix_caching": draw.random() < 0.85,
            "max_lease": draw.choice([1, 3, 7, 16]),
            "num_host_pages": draw.choice([0, 0, 1, 5, 20, 1000]),
            "step_seconds": draw.choice([0.0, 0.0002, 0.0002, 0.001, 0.01]),
        }

    def _plan_faults(self) -> None:
        """Deaths, wrong and late answers; no more than an engine puts up with in a row."""
        draw, executor = self.random, self.harness.executor
        executor.token_seconds = draw.choice([0.0, 0.00005])
        for _ in range(draw.choice([0, 0, 0, 1, 2, 3])):
            kind = draw.choice([executor.fail_at, executor.fail_submit_at, executor.stale_at])
            kind.add(draw.randint(0, 40))
        for _ in range(draw.choice([0, 0, 1, 2])):
            executor.errors.add((draw.randint(0, 9), draw.randint(0, 8)))
        for _ in range(draw.choice([0, 0, 3])):
            executor.delays[draw.randint(0, 40)] = draw.random() * 0.05

    def _plan_requests(self) -> None:
        draw, now = self.random, 0.0
        pause = draw.choice([0.0, 0.0005, 0.005, 0.03])
        for _ in range(draw.randint(1, 14)):
            now += draw.expovariate(1 / pause) if pause else 0.0
            self._at(now, self._arrive)
        if draw.random() < 0.1:
            self._at(now * draw.random(), lambda: self._abort_client(draw.choice("ab")))

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, len(self._events) + self.random.getrandbits(40), event))

    def _arrive(self) -> None:
        draw, harness = self.random, self.harness
        prompt = self._prompt()[: self.model_len // 4 if self.outgrows else self.model_len - 1]
        most = 60 if self.outgrows else draw.choice([1, 5, 12, 40])
        longest = min(self.model_len - len(prompt), most)
        vocabulary = range(harness.config.vocab_size)
        settings: dict[str, Any] = {
            "stop": draw.sample(vocabulary, draw.choice([0, 0, 1, min(12, len(vocabulary) - 1)])),
            "eos": draw.sample(vocabulary, draw.choice([0, 0, 1])),
            "priority": draw.randint(0, 2),
            "client": draw.choice("ab"),
            "extra_keys": draw.choice([(), (), (), ("salt",)]),
        }
        if draw.random() < 0.12:
            settings["beams"] = BeamParams(
                draw.randint(1, 5),
                draw.choice([1.0, 1.0, 0.0, -0.7, 1.5]),
                draw.choice([False, True, "never"]),
            )
        elder: int | None = None
        for _ in range(draw.choice([1, 1, 1, 2, 5])):  # choices of one prompt
            try:
                stream = harness.add(prompt, draw.randint(1, longest), sibling_of=elder, **settings)
            except InvalidRequest:
                assert "beams" in settings, "refused"
                self.refused += 1
                return
            elder = stream.source.key if elder is None else elder
            if draw.random() < 0.15:
                later = harness.executor.clock + draw.expovariate(1 / 0.01)
                self._at(later, lambda stream=stream: harness.abort(stream))

    def _prompt(self) -> list[int]:
        """A start that others have too, a conversation that goes on, or a prompt of its own."""
        draw, harness = self.random, self.harness
        own = [draw.randrange(harness.config.vocab_size) for _ in range(draw.randint(1, 9))]
        match draw.randint(0, 3):
            case 0:
                return own * draw.randint(1, 6)
            case 1:
                return draw.choice(STARTS)[: draw.randint(1, self.model_len)] + own
            case 2 if harness.streams:
                earlier = draw.choice(list(harness.streams.values()))
                return [*earlier.source.prompt.tolist(), *earlier.tokens, *own]
            case _:
                return draw.choice(STARTS)[: draw.randint(1, self.model_len)]

    def _abort_client(self, client: str) -> None:
        self.harness.engine.abort_client(client)
        for stream in self.harness.streams.values():
            if stream.source.client == client:
                stream.aborted = stream.aborted or stream.open


def simulate(seed: int) -> Counter[str]:
    """Lives one life; says what happened in it.

    Raises:
        AssertionError: something was not as it must be.
    """
    life = Life(seed)
    life.run()
    harness, stats = life.harness, life.harness.engine.stats()
    happened = Counter(stats.finished)
    happened["steps"] = stats.steps
    happened["calls"] = harness.executor.num_run
    happened["preemptions"] = stats.preemptions
    happened["swaps"] = stats.preemptions_by_swap
    happened["pages swapped in"] = stats.swapped_in
    happened["restarts"] = harness.executor.epoch
    happened["prefix hits"] = stats.prefix_hits
    happened["searches refused"] = life.refused
    happened["searches"] = sum(
        stream.ended is not None and bool(stream.ended.hypotheses)
        for stream in harness.streams.values()
    )
    happened["forks"] = sum(int((info.moves[:, 0] == COPY).sum()) for info in harness.executor.log)
    happened["leases"] = sum(info.lease > 1 for info in harness.executor.log)
    return happened


def main() -> int:
    parser = argparse.ArgumentParser(description="Random lives of an engine without a model.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many lives (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed (default 0)")
    parser.add_argument("--seed", type=int, help="only this one")
    options = parser.parse_args()
    first, count = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    happened: Counter[str] = Counter()
    started = time.monotonic()
    for seed in range(first, first + count):
        try:
            happened += simulate(seed)
        except Exception:
            traceback.print_exc()
            print(f"\nSeed {seed} failed. Again: python tests/simulate.py --seed {seed}")
            return 1
    print(f"{count} lives in {time.monotonic() - started:.1f} s:")
    print("  " + ", ".join(f"{value:,} {name}" for name, value in happened.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

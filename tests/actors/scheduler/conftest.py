"""An engine on an executor without a model, which holds every step against DESIGN 4's contract."""

import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rayfin.actors.config import BatchLimits, EngineConfig
from rayfin.actors.messages import (
    NO_TOKEN,
    SAMPLED_LAST_STEP,
    Ended,
    EngineRequest,
    Sampling,
    SchedulerInfo,
    StepResult,
    StopRules,
)
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.executor import GroupFailed

UNWRITTEN = -7


def next_token(context: Sequence[int], seed: int, vocab_size: int) -> int:
    """The fake model: a hash of the whole context and the request's seed."""
    return zlib.crc32(np.array([seed, *context], np.int32).tobytes()) % vocab_size


@dataclass(slots=True)
class Stream:
    """What a client has got of one request, and what it must have got in the end."""

    source: EngineRequest
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None
    aborted: bool = False

    @property
    def seed(self) -> int:
        return self.source.sampling.seed

    @property
    def open(self) -> bool:
        return self.ended is None and not self.aborted


def oracle(source: EngineRequest, vocab_size: int) -> tuple[list[int], str, int | None]:
    """The tokens, finish reason and stop reason of a request that runs alone to its end."""
    stopping, output = source.stopping, list(source.output)
    while True:
        output.append(next_token([*source.prompt, *output], source.sampling.seed, vocab_size))
        if output[-1] in stopping.stop_token_ids:
            return output, "stop", None if output[-1] in stopping.eos_token_ids else output[-1]
        if len(output) == stopping.max_tokens:
            return output, "length", None


@dataclass(slots=True)
class _Mirror:
    """What a runner knows of one handle, from diffs alone."""

    stream: Stream
    known: int  # tokens that the scheduler knew when it sent the request
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    sampled: int | None = None
    sampled_position: int = -1


@dataclass(slots=True)
class _FakeStep:
    executor: "FakeExecutor"
    info: SchedulerInfo
    sent: bytes

    def result(self) -> StepResult:
        assert pickle.dumps(self.info) == self.sent, "a step was changed after it was submitted"
        return self.executor.run(self.info)


class FakeExecutor:
    """Follows steps by their diffs only, and asserts that they say enough and say it right.

    ``fail_at`` holds the steps (counted over all epochs, from 0) at which the group dies,
    ``errors`` the (seed, output index) pairs whose row fails alone.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.epoch = 0
        self.config = config
        self.streams: dict[int, Stream] = {}  # by seed: what only a test can know
        self.fail_at: set[int] = set()
        self.fail_submit_at: set[int] = set()
        self.errors: set[tuple[int, int]] = set()
        self.log: list[SchedulerInfo] = []
        self.left: list[int] = []  # seeds of the handles that were forgotten, in order
        self.entered: list[int] = []  # seeds of new requests, in order
        self.live: dict[int, _Mirror] = {}
        self.num_submitted = 0
        self.num_run = 0
        self._dead = False
        self._next_step = 0
        self._memory = self._fresh_memory()

    def submit(self, info: SchedulerInfo) -> _FakeStep:
        self.num_submitted += 1
        if self._dead or self.num_submitted - 1 in self.fail_submit_at:
            self._dead = True
            raise GroupFailed("the runner is gone")
        return _FakeStep(self, info, pickle.dumps(info))

    def restart(self) -> None:
        self.epoch += 1
        self.live.clear()
        self._dead = False
        self._next_step = 0
        self._memory = self._fresh_memory()

    def run(self, info: SchedulerInfo) -> StepResult:
        self.num_run += 1
        if self._dead or self.num_run - 1 in self.fail_at:
            self._dead = True
            raise GroupFailed("the runner died")
        assert (info.epoch, info.step) == (self.epoch, self._next_step)
        self._next_step += 1
        self.log.append(info)
        self._check_form(info)
        self._check_limits(info)
        self._take_news(info)
        result = StepResult(info.epoch, info.step, np.full(len(info.ids), NO_TOKEN, np.int32))
        for row in range(len(info.ids)):
            self._run_row(info, row, result)
        return result

    def _fresh_memory(self) -> np.ndarray:
        return np.full(self.config.num_pages * self.config.page_size, UNWRITTEN, np.int64)

    def _check_form(self, info: SchedulerInfo) -> None:
        rows = len(info.ids)
        assert rows > 0, "an empty step"
        for name in ("chunk_idx", "chunk_len", "kv_len", "kv_page_len", "last_pos"):
            array = getattr(info, name)
            assert array.shape == (rows,) and array.dtype == np.int32, name
        for name in ("ids", "merge_prompt", "new_pages", "new_pages_len"):
            assert getattr(info, name).dtype == np.int32, name
        assert info.is_decoding.dtype == np.bool_
        assert len(set(info.ids.tolist())) == rows, "a handle twice in one step"
        assert info.decoding_batch + info.prefill_batch == rows
        assert info.is_decoding.tolist() == [i < info.decoding_batch for i in range(rows)]
        assert (info.chunk_len >= 1).all()
        assert info.chunk_idx.tolist() == (np.cumsum(info.chunk_len) - info.chunk_len).tolist()
        assert info.chunk_len.sum() == len(info.merge_prompt)
        assert (info.chunk_len[info.is_decoding] == 1).all()
        assert (info.last_pos[info.is_decoding] == 0).all()
        assert info.new_pages_len.sum() == len(info.new_pages) and (info.new_pages_len >= 0).all()
        assert info.lease == 1

    def _check_limits(self, info: SchedulerInfo) -> None:
        limits = self.config.limits
        assert len(info.merge_prompt) <= limits.max_batch_tokens
        assert len(info.ids) <= limits.max_decoding_batch
        assert info.prefill_batch <= limits.max_prefill_batch
        if self.config.scheduler == "v0":
            assert not (info.decoding_batch and info.prefill_batch), "V0 mixes"

    def _take_news(self, info: SchedulerInfo) -> None:
        for handle in info.finished:
            assert handle in self.live, "forgets an unknown handle"
            self.left.append(self.live.pop(handle).stream.seed)
        for new in info.new_requests:
            assert 0 <= new.handle < self.config.limits.max_decoding_batch
            assert new.handle not in self.live, "a live handle is given away"
            stream = self.streams[new.sampling.seed]
            assert new.sampling == stream.source.sampling
            known = len(stream.source.prompt) + len(stream.tokens)
            self.live[new.handle] = _Mirror(stream, known)
            self.entered.append(stream.seed)
        pages = iter(info.new_pages.tolist())
        for handle, count in zip(info.ids.tolist(), info.new_pages_len.tolist(), strict=True):
            self.live[handle].pages += [next(pages) for _ in range(count)]
        held = [page for mirror in self.live.values() for page in mirror.pages]
        assert len(set(held)) == len(held), "a page is held twice"
        assert all(0 <= page < self.config.num_pages for page in held)

    def _run_row(self, info: SchedulerInfo, row: int, result: StepResult) -> None:
        mirror = self.live[int(info.ids[row])]
        chunk = self._resolve(info, row, mirror)
        assert info.kv_len[row] == mirror.num_tokens
        assert info.kv_page_len[row] == len(mirror.pages) <= self.config.max_pages_per_request
        assert len(mirror.pages) * self.config.page_size >= mirror.num_tokens + len(chunk)
        for token in chunk:
            self._memory[self._slot(mirror, mirror.num_tokens)] = token
            mirror.num_tokens += 1
        source = mirror.stream.source
        context = [int(self._memory[self._slot(mirror, i)]) for i in range(mirror.num_tokens)]
        self._check_context(source, context)
        mid_prompt = mirror.num_tokens < mirror.known
        assert info.last_pos[row] == (NO_TOKEN if mid_prompt else len(chunk) - 1)
        if self.config.scheduler == "v0":
            assert not mid_prompt, "V0 splits a prompt"
        if mid_prompt:
            return
        index = mirror.num_tokens - len(source.prompt)
        if (source.sampling.seed, index) in self.errors:
            result.errors[row] = "planted"
            result.tokens[row] = 0  # whatever a failed row sampled, nobody may see it
            mirror.sampled = None
            return
        mirror.sampled = next_token(context, source.sampling.seed, self.config.vocab_size)
        mirror.sampled_position = mirror.num_tokens
        result.tokens[row] = mirror.sampled

    def _resolve(self, info: SchedulerInfo, row: int, mirror: _Mirror) -> list[int]:
        """The row's tokens; a placeholder only where this runner sampled just that token."""
        chunk = info.chunk_prompt(row).tolist()
        if not info.is_decoding[row]:
            assert SAMPLED_LAST_STEP not in chunk, "a placeholder in a prompt"
            return chunk
        if mirror.sampled is None:  # it failed, and the scheduler does not know yet
            assert (mirror.stream.seed, self._index(mirror)) in self.errors
            return [0]
        assert mirror.sampled_position == mirror.num_tokens, "decodes before it has sampled"
        assert chunk[0] in (SAMPLED_LAST_STEP, mirror.sampled)
        return [mirror.sampled]

    def _index(self, mirror: _Mirror) -> int:
        return mirror.num_tokens - len(mirror.stream.source.prompt)

    def _check_context(self, source: EngineRequest, context: list[int]) -> None:
        """What the pages hold is the prompt and what the fake model says after it."""
        prompt = source.prompt.tolist()
        assert context[: len(prompt)] == prompt[: len(context)]
        failed = [index for seed, index in self.errors if seed == source.sampling.seed]
        for position in range(len(prompt), len(context)):
            if position - len(prompt) in failed:
                return
            if position - len(prompt) < len(source.output):
                assert context[position] == source.output[position - len(prompt)]
                continue
            seed = source.sampling.seed
            assert context[position] == next_token(context[:position], seed, self.config.vocab_size)

    def _slot(self, mirror: _Mirror, position: int) -> int:
        size = self.config.page_size
        return mirror.pages[position // size] * size + position % size


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
        )
        self.engine.add(source)
        stream = Stream(source, list(output))
        self.executor.streams[seed] = stream
        self.streams[client, source.key] = stream
        return stream

    def abort(self, stream: Stream) -> None:
        self.engine.abort(stream.source.client, stream.source.key)
        stream.aborted = stream.aborted or stream.open
        self.engine.check_integrity()

    def step(self) -> None:
        """One step; every message goes to an open stream, at most one token each."""
        self.read(self.engine.step())
        self.engine.check_integrity()

    def read(self, messages: dict[str, Any]) -> None:
        for client, deltas in messages.items():
            keys = deltas.keys.tolist()
            assert len(keys) == len(set(keys)) == len(deltas.tokens)
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
        tokens, reason, stop = oracle(stream.source, self.config.vocab_size)
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
) -> Harness:
    if scheduler == "v0":
        max_batch_tokens = max(max_batch_tokens, max_model_len)  # as resolve_limits has it
    limits = BatchLimits(
        max_batch_tokens=max_batch_tokens,
        max_decoding_batch=max_decoding_batch,
        max_prefill_batch=max_prefill_batch,
    )
    return Harness(
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
        )
    )


@pytest.fixture(scope="session")
def harness() -> Callable[..., Harness]:
    """`make_harness`, as a fixture: test folders hold no importable modules."""
    return make_harness


@pytest.fixture(params=["v0", "v1"])
def scheduler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[1, 2])
def steps_in_flight(request: pytest.FixtureRequest) -> int:
    return int(request.param)

"""An engine on runners without a model, and clients that hold every stream against the oracle.

What the scheduler's tests and the simulator (tools/simulate.py) drive.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from event_reader import EventReader
from fake_runner import FakeExecutor
from fake_stream import Stream
from rayfin.actors.adapters.part import AdapterFacts, AdapterRef
from rayfin.actors.config import BatchLimits, EngineConfig
from rayfin.actors.errors import DeadlineExceeded, InvalidRequest, RequestQuarantined
from rayfin.actors.guidance import Guidance
from rayfin.actors.media.part import MediaInput
from rayfin.actors.messages import (
    BeamParams,
    EngineRequest,
    PagesAt,
    Pin,
    Repetition,
    Sampling,
    SchedulerInfo,
    SessionRef,
    StopRules,
)
from rayfin.actors.parts import RequestPart
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.kv_events import PageEvents
from rayfin.actors.scheduler.page_tier import SourcesTier, request_to_warm
from rayfin.actors.scheduler.sessions.sessions import Session
from rayfin.actors.settings.kv_events import KVEventsConfig
from rayfin.actors.timing import LOBBY_TICK_SECONDS, PARKED_IDLE_SECONDS
from rayfin.actors.weights.version import BASE_LABEL


class Harness:
    """An engine on a FakeExecutor, and the clients that read its streams."""

    integrity_every = 1  # steps
    keep_history = True

    def __init__(self, config: EngineConfig) -> None:
        self.executor = FakeExecutor(config)
        self.config = config
        self._begin()
        self.streams: dict[tuple[str, int], Stream] = {}
        self.history: list[tuple[int, int]] = []  # (seed, token) as they came
        self.num_added = 0
        self._timed: list[tuple[float, int, Stream]] = []  # heap by deadline
        self._unheard: dict[int, Stream] = {}  # by seed: what no runner has heard of yet
        self._last_admitted: dict[Any, int] = {}  # by class: the seed
        self._num_entered = 0
        self._only_parked: float | None = None  # since when nothing but parked requests is here
        self._paused: dict[Session, Any] = {}  # with seats: since when, and their pages

    def _begin(self) -> None:
        self.engine = Engine(self.config, self.executor, lambda: self.executor.clock)
        tables = self.engine.lifecycle.state.tables
        invalidate = tables.invalidate

        def spoil(slot: int) -> None:  # pages that an error has spoiled are no longer kept
            self._paused.clear()
            invalidate(slot)

        tables.invalidate = spoil  # type: ignore[method-assign]
        tier = self.engine.lifecycle.tier
        if isinstance(tier, SourcesTier):
            tier.least_read_tokens = tier.least_stored_tokens = 1
        self.events = PageEvents(KVEventsConfig(), self.config.page_size, 0, 0.0)
        self.reader = EventReader()
        if (index := self.engine.lifecycle.state.tables.index) is not None:
            index.observer = self.events

    def add(
        self,
        prompt: Sequence[int] | int,
        max_tokens: int = 4,
        *,
        stop: Iterable[int] = (),
        eos: Iterable[int] = (),
        priority: int = 0,
        tenant: str = "",
        timeout: float | None = None,
        client: str = "a",
        key: int | None = None,
        output: Sequence[int] = (),
        extra_keys: tuple[str, ...] = (),
        parent_key: int | None = None,
        beams: BeamParams | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        deaths: int = 0,
        guidance: Guidance | None = None,
        repetition: Repetition | None = None,
        pin: Pin | None = None,
        background: bool = False,
        adapter: AdapterRef | None = None,
        images: tuple[MediaInput, ...] = (),
        session: SessionRef | None = None,
        pages_at: PagesAt | None = None,
        parts: tuple[RequestPart, ...] = (),
    ) -> Stream:
        """Hands a request to the engine; a number is the length of a prompt of its own."""
        seed = self.num_added
        if isinstance(prompt, int):
            prompt = [(7 * seed + i) % self.config.vocab_size for i in range(prompt)]
        source = EngineRequest(
            request_id=f"r{seed}",
            prompt=np.array(prompt, np.int32),
            sampling=Sampling(seed=seed, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
            stopping=StopRules(
                max_tokens, frozenset(stop) | frozenset(eos), frozenset(eos), repetition
            ),
            client=client,
            key=seed if key is None else key,
            priority=priority,
            tenant=tenant,
            timeout=timeout,
            output=list(output),
            extra_keys=extra_keys,
            parent_key=parent_key,
            beams=beams,
            deaths=deaths,
            pin=pin,
            background=background,
            session=session,
            pages_at=pages_at,
            parts=(*parts, *images, *(() if guidance is None else (guidance,))),
        )
        if adapter is not None:
            source.use(adapter)
        if guidance is not None and not self.executor.grammar_errors.isdisjoint(guidance.grammars):
            self.executor.errors.add((seed, len(output)))  # a step that compiles fails its row
        waiting = self._num_waiting_beside()
        self.engine.add(source)
        self.num_added += 1
        stream = Stream(source, self.config.vocab_size, self.executor.version)
        stream.waited = self._num_waiting_beside() > waiting
        stream.arrival = self.executor.clock
        self.executor.streams[seed] = stream
        self.streams[client, source.key] = stream
        self._unheard[seed] = stream
        if timeout is not None:
            stream.deadline = stream.arrival + timeout
            heapq.heappush(self._timed, (stream.deadline, seed, stream))
        return stream

    def lose_scheduler(self) -> None:
        """A new engine takes the runners over, and clients send it all that is open again."""
        before = self.executor.names.all()
        self.executor.adopt()
        self._begin()
        self.engine.lifecycle.state.tables.restore(before)
        self.engine.check_integrity()
        for stream in self.streams.values():
            if stream.open:
                stream.source = replace(stream.source, output=list(stream.tokens))
                self.engine.add(stream.source)

    def may_move(self, stream: Stream) -> bool:
        """Whether the stream may go on at another engine, as far as this harness can follow."""
        try:  # the other one would have a quarantine of its own
            self.engine._quarantine.check(stream.source)
        except RequestQuarantined:
            return False
        source, updates = stream.source, self.engine.updates
        plain = source.beams is None and source.sampling.prompt_logprobs is None
        still = not (
            updates.version.serial or updates.state(None).pausing or self.engine.state != "serving"
        )
        return stream.open and bool(stream.tokens) and plain and still and source.timeout is None

    def warm(self, stream: Stream, engine: str, arrived: Callable[[int], None]) -> None:
        """Reads the pages of a stream that an engine has."""
        tokens = np.array([*stream.source.prompt, *stream.tokens], np.int32)
        size = self.config.page_size
        at = PagesAt(engine, len(tokens) // size - 1)
        request = request_to_warm(tokens, stream.source.prefix_keys, at, size)
        self.engine.lifecycle.tier.warm(request, arrived)

    def move(self, stream: Stream) -> None:
        """The stream ends at an engine, and goes on at this one."""
        self.engine.abort(stream.source.client, stream.source.key)
        self.engine.add(replace(stream.source, output=list(stream.tokens)))

    def evict(self) -> None:
        """Free pages that nothing claims leave the cache, as if a request took them."""
        tables = self.engine.lifecycle.state.tables
        pages = tables._allocate(tables.num_unclaimed)
        assert pages is not None
        tables._free(pages)
        self.engine.check_integrity()

    def _num_waiting_beside(self) -> int:
        """Requests that wait beside the queue, where others may pass them."""
        return self.engine.lifecycle.num_beside

    def abort(self, stream: Stream) -> None:
        self.engine.abort(stream.source.client, stream.source.key)
        stream.aborted = stream.aborted or stream.open
        self.engine.check_integrity()

    def wait(self, until: float = math.inf) -> None:
        """Lets the time pass in which the engine's thread only waits for grammars or pages."""
        engine, executor = self.engine, self.executor
        if engine.has_work and not engine.has_steps:
            woken = min(until, executor.next_prepared, executor.clock + LOBBY_TICK_SECONDS)
            executor.clock = max(executor.clock, woken)

    def step(self) -> None:
        """One step; every message goes to an open stream, at most a lease's tokens each."""
        now = self.executor.clock
        self.read(self.engine.step())
        if self.executor.num_submitted % self.integrity_every == 0:
            self.engine.check_integrity()
            if (host := self.engine.lifecycle.state.host) is not None:
                host.check_integrity()
            self.executor.check_names()
            check_sessions(self.engine)
            self._check_paused()
        if self.executor.num_submitted % (16 * self.integrity_every) == 0:
            self.check_events()
        while self._timed and self._timed[0][0] <= now:  # I14
            assert not heapq.heappop(self._timed)[2].open, "it goes on after its deadline"
        self._check_admissions()
        self._check_idle()

    def _check_idle(self) -> None:
        """S6: an engine with nothing but parked requests gives one a seat in time."""
        engine, now = self.engine, self.executor.clock
        seats, live = engine.lifecycle.seats, engine.lifecycle.state.live
        if seats is None:
            return
        if not engine.has_work or engine.has_steps or len(live) > len(seats):
            self._only_parked = None
            return
        self._only_parked = now if self._only_parked is None else self._only_parked
        assert now - self._only_parked < PARKED_IDLE_SECONDS + 1.0, "parked, and nothing runs"

    def _check_paused(self) -> None:
        """S2: a paused seat keeps all of its pages, or loses the seat with them."""
        seats = self.engine.lifecycle.seats
        if seats is None:
            return
        claims = self.engine.lifecycle.state.tables.claims
        before, self._paused = self._paused, {}
        for session in seats.sessions.paused:
            pages = claims.pages(session)
            self._paused[session] = session.seated, session.paused, pages
            seated, paused, kept = before.get(session, (None, None, []))
            if (seated, paused) == (session.seated, session.paused):
                assert pages == kept, "a paused seat has lost pages"

    def check_events(self) -> None:
        """S8: what the events tell is what the index has."""
        for message in self.events.messages(self.executor.clock):
            assert self.reader.read(*message), "a number is missing"
        if (index := self.engine.lifecycle.state.tables.index) is not None:
            known = {int.from_bytes(page_hash[-8:], "big") for page_hash in index.hashes()}
            assert known == self.reader.pages.keys(), "events tell other pages"

    def read(self, messages: dict[str, Any]) -> None:
        for client, deltas in messages.items():
            keys = deltas.keys.tolist()
            assert len(keys) == len(deltas.tokens)
            most = _most_tokens(self.executor.log[-1]) if self.executor.log else 0
            assert max(Counter(keys).values(), default=0) <= most
            assert keys or deltas.ended or deltas.prompt_logprobs, "an empty message"
            for at, entry in deltas.logprobs.entries() if deltas.logprobs is not None else ():
                self.streams[client, keys[at]].logprobs.append(entry)
            for key, logprobs in deltas.prompt_logprobs.items():
                stream = self.streams[client, key]
                assert stream.open, "a prompt's log probabilities after the end"
                for position, entry in logprobs.entries():
                    assert position == len(stream.prompt_logprobs) + 1, (
                        "delivered twice, or not at all"
                    )
                    stream.prompt_logprobs.append(entry)
                version = int(deltas.weights) if deltas.weights.isdigit() else 0
                stream.scored += [version] * (len(stream.prompt_logprobs) - len(stream.scored))
            for key, token in zip(keys, deltas.tokens.tolist(), strict=True):
                stream = self.streams[client, key]
                assert stream.open, "a token after the end"
                stream.tokens.append(token)
                stream.labels.append(deltas.weights)
                if self.keep_history:
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
            self.wait()
        assert not self.engine.has_work, "the engine does not get done"
        assert self.engine.lifecycle.state.tables.num_held == 0
        assert self.engine.step() == {}
        self.check_events()

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
            self.check_stream(stream)

    def _may_be_convicted(self, stream: Stream) -> bool:
        """It killed its runners alone, or another one with its prompt did and is convicted too."""
        executor = self.executor

        def killed(other: Stream) -> bool:
            ended = other.ended is not None and isinstance(other.ended.error, RequestQuarantined)
            guilty = executor.deaths[other.seed] > 0 or executor.killed_alone[other.seed] > 1
            return ended and guilty

        return any(
            killed(other)
            for other in self.streams.values()
            if np.array_equal(other.source.prompt, stream.source.prompt)
        )

    def check_stream(self, stream: Stream) -> None:
        """It is over, and got exactly what it should have got until then."""
        tokens, reason, stop = self.expected(stream)
        stream.check_logprobs()
        first = len(stream.source.prompt) + len(stream.source.output)
        for position, label in enumerate(stream.labels, start=first):
            version = stream.version_at(position)
            assert label == (str(version) if version else BASE_LABEL), "another version made it"
        if stream.ended is not None and stream.ended.finish_reason == "abort":
            assert stream.tokens == tokens[: len(stream.tokens)]
            return
        if stream.aborted:
            assert stream.ended is None
            assert stream.tokens == tokens[: len(stream.tokens)]
            return
        assert stream.ended is not None, "no end"
        error = stream.ended.error
        if isinstance(error, DeadlineExceeded):
            assert stream.deadline <= self.executor.clock, "it had time left"
            assert stream.tokens == tokens[: len(stream.tokens)]
            assert stream.ended.finish_reason == "error"
        elif isinstance(error, RequestQuarantined):
            assert self._may_be_convicted(stream), "an innocent is convicted"
            assert stream.tokens == tokens[: len(stream.tokens)]
        elif isinstance(error, InvalidRequest):  # its grammar does not compile
            guidance = stream.source.part(Guidance)
            assert error.code == "grammar_failed" and guidance is not None
            assert not self.executor.grammar_errors.isdisjoint(guidance.grammars)
            assert stream.tokens == stream.source.output and stream.ended.finish_reason == "error"
        else:
            assert stream.seed not in self.executor.poison, "it went on"
            assert stream.tokens == tokens
            assert (stream.ended.finish_reason, stream.ended.stop_reason) == (reason, stop)
            assert (error is not None) == (reason == "error")
            found = [] if stream.source.beams is None or reason == "error" else stream.search[0]
            assert stream.ended.hypotheses == found
        assert 0 <= stream.ended.cached_tokens < len(stream.source.prompt) + len(tokens)

    def forget(self, stream: Stream) -> None:
        """A stream that is over leaves the books, and so does all that the executor wrote down."""
        del self.streams[stream.source.client, stream.source.key]
        del self.executor.streams[stream.seed]
        self._unheard.pop(stream.seed, None)
        for book in (self.executor.log, self.executor.left, self.executor.entered):
            del book[:-1]
        self.executor.prepared.clear()
        self._num_entered = len(self.executor.entered)

    def _check_admissions(self) -> None:
        """I9 and I10, of those that a runner hears of for the first time."""
        for seed in self.executor.entered[self._num_entered :]:
            stream = self._unheard.pop(seed, None)
            if stream is None or stream.waited:  # others may pass it, as long as it is not queued
                continue
            group = self._order_group(stream)
            assert self._last_admitted.get(group, -1) < seed, "overtaken in its class"
            self._last_admitted[group] = seed
            if stream.source.background:
                continue
            if self.config.policy == "priority" and self.config.priority_aging:
                rank = self._aged(stream)
                for other in self._unheard.values():
                    if other.source.background or other.seed > seed or not other.open:
                        continue
                    if not other.waited:
                        assert rank <= self._aged(other), "overtaken by too late a request"
        self._num_entered = len(self.executor.entered)

    def _order_group(self, stream: Stream) -> Any:
        """Requests of one group are admitted in the order in which they come."""
        if stream.source.background:
            return "background"
        match self.config.policy:
            case "priority":
                return stream.source.priority
            case "fair":
                return stream.source.tenant
        return None

    def _aged(self, stream: Stream) -> float:
        return stream.arrival + stream.source.priority * self.config.priority_aging


def check_sessions(engine: Engine) -> None:
    """S1 and S7: what is claimed can be found, and claimed by seats and pins alone."""
    seats, tables = engine.lifecycle.seats, engine.lifecycle.state.tables
    if seats is None:
        return
    assert tables.index is not None
    claims, seated = tables.claims, seats.sessions.seated
    pages = {page for claimant in claims.claimants for page in claims.pages(claimant)}
    assert all(page in tables.index for page in pages)
    sessions = [claimant for claimant in claims.claimants if isinstance(claimant, Session)]
    assert {session.key for session in sessions} <= {session.key for session in seated}
    for claimant in claims.claimants:
        others = [other for other in claims.claimants if other is not claimant]
        alone = set(claims.pages(claimant)).difference(*map(claims.pages, others))
        assert claims.num_alone(claimant) == len(alone)
    assert len(seats.sessions.turns) <= len(engine.lifecycle.state.live)


def _most_tokens(info: SchedulerInfo) -> int:
    return info.num_steps if info.grants is None else int(info.grants.max())


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
    max_loras: int = 0,
    **settings: Any,
) -> Harness:
    """A harness for tests; ``settings`` are further fields of EngineConfig."""
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
            parts=(AdapterFacts(at_once=max_loras),) if max_loras else (),
            **settings,
        )
    )
    harness.executor.step_seconds = step_seconds
    return harness

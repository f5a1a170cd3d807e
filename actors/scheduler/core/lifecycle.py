"""The only transitions of a request besides a step: admit, preempt, finish.

        add                admit
(door) ─────► waiting ───────────────► running ─────► finished
                 ▲                        │   finish
                 └────────────────────────┘
                          preempt
"""

import time
from collections import Counter
from collections.abc import Callable, Container

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import NewRequest
from rayfin.actors.scheduler.core.cached_prefix import PrefixLookup
from rayfin.actors.scheduler.core.microbatches import DecodeMicrobatcher
from rayfin.actors.scheduler.core.preempted_pages import PreemptionPolicy, Recompute, Swap
from rayfin.actors.scheduler.queues.queue_limits import QueueLimits
from rayfin.actors.scheduler.queues.waiting_queue import make_queue
from rayfin.actors.scheduler.state.counters import EngineCounters
from rayfin.actors.scheduler.state.page_moves import PageMoves
from rayfin.actors.scheduler.state.request import Request
from rayfin.actors.scheduler.state.runner_diff import RunnerDiff
from rayfin.actors.scheduler.state.running_table import RunningTable
from rayfin.cache.page_tables import PageTables


class Lifecycle:
    """Moves requests between queue, slots and page tables, and notes it for the runners."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        slots = config.limits.max_decoding_batch
        self.waiting = make_queue(config)
        self.newcomers = QueueLimits(config.max_waiting_requests, config.max_waiting_tokens)
        self.running = RunningTable(slots, config.max_model_len)
        self.microbatcher = DecodeMicrobatcher(self.running, max(config.steps_in_flight - 1, 1))
        self.tables = PageTables(
            slots, config.num_pages, config.page_size, prefix_caching=config.prefix_caching
        )
        self.moves = PageMoves()
        self.preemption: PreemptionPolicy = (
            Swap(config.num_host_pages, self.running, self.tables, self.moves)
            if config.num_host_pages
            else Recompute()
        )
        self.runner_diff = RunnerDiff()
        self._starts = PrefixLookup(self.running, self.tables, self.moves, self.runner_diff)
        self.clients: list[str] = []  # by the index that RunningTable.client holds
        self.counts = EngineCounters(config.max_model_len)
        self.num_preemptions = 0  # for want of pages
        self.num_requeued = 0  # because the runners were replaced
        self.num_finished: Counter[str] = Counter()  # by finish reason
        self.recomputed = 0  # admissions up to this one: all that stood on their pages was requeued
        self.gated: Container[Request] = ()  # requests that may not be admitted with others
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._clock = clock
        self._client_index: dict[str, int] = {}

    def enqueue(self, request: Request) -> None:
        """A new request waits from now on."""
        self.newcomers.joined(request)
        self.waiting.push(request)

    def can_admit(self, request: Request, spare: int) -> bool:
        """Whether the request may be admitted beside others, and there is room for it."""
        return request not in self.gated and self.has_room(request, spare)

    def has_room(self, request: Request, spare: int) -> bool:
        """Whether slots are free, and pages for its tokens and one more, with ``spare`` left.

        One more of each of its beams, where it is a beam search.

        And whether there is nothing to wait for (``PrefixLookup.find``).
        """
        if self.running.num_free_slots < request.width:
            return False
        start = self._starts.find(request)
        if start is None:
            return False
        pages = self.tables.pages_for(request.num_tokens + 1) + request.width - 1
        missing = pages - len(start.pages)
        return missing + spare <= self.tables.num_free_without(start.pages)

    def num_to_compute(self, request: Request) -> int:
        """Tokens of the waiting request that are neither cached nor in host memory."""
        start = self._starts.find(request)
        cached = 0 if start is None else start.num_tokens
        return request.num_tokens - max(cached, self.preemption.num_saved(request))

    def admit(self) -> int:
        """The first waiting request starts to run, with pages for all its known tokens.

        Tokens of its cached prefix (``PrefixLookup``) count as computed, and so do those that come
        back from host memory.
        """
        request = self.waiting.pop()
        start = self._starts.find(request)
        assert start is not None, "admitted before its time"
        cached = start.num_tokens
        slot = self.running.enter(request, self._client(request.source.client), cached)
        self._starts.make(start, slot)
        if not request.admitted:
            self.newcomers.left(request)
            request.admitted_at = self._clock()
            request.cached_tokens = cached
            self.counts.admitted(request)
            if start.fork_parent is None:
                self.prefix_queries += request.num_tokens
                self.prefix_hits += cached
        grown = self.tables.grow(slot, request.num_tokens)
        assert grown, "admitted without pages"
        self.preemption.restore(slot, len(start.pages))
        for _ in range(request.width - 1):
            self.running.reserve(request, self._client(request.source.client))
        self.waiting.entered(request)
        self.introduce(slot)
        return slot

    def introduce(self, slot: int) -> None:
        """The runners shall hear of the slot's request as soon as a step has a row of it."""
        running, source = self.running, self.running.request(slot).source
        known = running.tokens[slot, : running.num_known[slot]]
        self.runner_diff.enter(
            NewRequest(
                handle=slot,
                sampling=source.sampling,
                cap=int(running.cap[slot]),
                stop_token_ids=source.stopping.stop_token_ids,
                history=known.copy() if source.sampling.needs_history else None,
                prompt_len=len(source.prompt),
            )
        )

    def publish(self, slot: int, num_tokens: int) -> None:
        """The slot's first ``num_tokens`` tokens are known and scheduled: others may share them."""
        if self.tables.index is not None:
            request = self.running.request(slot)
            tokens = self.running.tokens[slot, :num_tokens]
            request.chain.extend(tokens)
            self.tables.publish(slot, request.chain, tokens)

    def preempt(self, slot: int) -> None:
        """Frees slot and pages of the slot's request, keeps its tokens: it is resumed later.

        A beam search gives up all of its slots, and starts again from its prompt.

        Tokens of steps in flight are dropped when they come and sampled again: sampling depends on
        (seed, position) alone, and nobody has seen them.
        """
        request = self.running.request(slot)
        self.preemption.keep(slot)
        self._leave(request)
        self.waiting.push(request)
        request.preemptions += 1
        self.num_preemptions += 1

    def finish(self, request: Request, reason: str, *, spoiled: bool = False) -> None:
        """The request ends, wherever it is; if ``spoiled``, nobody may use what it computed."""
        request.ended = True
        search = request.search
        if request.slot is None:
            self.waiting.discard(request)
            self.preemption.forget(request)
            self.newcomers.left(request)
        else:
            if spoiled:
                for slot in request.slots:
                    self.tables.invalidate(slot)
            self._leave(request, share=not spoiled)
        self.num_finished[reason] += 1
        if reason != "moved":
            found = search.hypotheses if search is not None else []
            generated = sum(len(own.tokens) for own in found) or len(request.output)
            self.counts.ended(request, generated, reason, self._clock())

    def requeue(self, request: Request) -> None:
        """What the running request has computed cannot be trusted: it computes it again."""
        for slot in request.slots:
            self.tables.invalidate(slot)
        self._leave(request, share=False)
        self.waiting.push(request)
        self.num_requeued += 1

    def restart(self) -> None:
        """The runners are new and empty: everything that ran is recomputed."""
        for request in self.running.holders():
            self.requeue(request)
        self.tables.forget()
        self.runner_diff.clear()
        self.moves.clear()
        self.preemption.clear()

    def victim(self) -> int:
        """The slot to preempt, by the policy's order, of which the first always advances."""
        running = self.running
        return self.waiting.victim([running.request(slot) for slot in running.slots()]).slots[0]

    def _leave(self, request: Request, *, share: bool = True) -> None:
        """Frees its slots. What they computed may be found again, if ``share``.

        Pages that decoding has filled become known only here: those who ask for them come later,
        as the next turn of a conversation or the same request after a preemption, and a step of
        many requests is spared the hashing.
        """
        self.waiting.left(request)
        for slot in list(request.slots):
            if share and not self.running.lockstep[slot]:
                known, computed = self.running.num_known[slot], self.running.num_computed[slot]
                self.publish(slot, min(int(computed), int(known) - 1))  # the last is not an input
            self.running.leave(slot)
            self.clear(slot)
        request.search = None

    def clear(self, slot: int) -> None:
        """Gives back the slot's pages; the runners shall forget it."""
        self.tables.release(slot)
        self.runner_diff.leave(slot)

    def _client(self, name: str) -> int:
        if name not in self._client_index:
            self._client_index[name] = len(self.clients)
            self.clients.append(name)
        return self._client_index[name]

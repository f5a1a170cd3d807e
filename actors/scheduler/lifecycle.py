"""The only transitions of a request besides a step: admit, preempt, finish.

 Engine.add         admit
───────────► waiting ───────────────► running ─────► finished
     │           ▲  ▲                    │   finish
     └─► beside ─┘  └────────────────────┘
                         preempt
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from rayfin.actors.messages import STATE_SAVE, Int64Array, NewRequest
from rayfin.actors.scheduler.admission import Admission
from rayfin.actors.scheduler.beside import Beside
from rayfin.actors.scheduler.cached_prefix import CachedPrefix
from rayfin.actors.scheduler.page_tier import NoTier, PageTier
from rayfin.actors.scheduler.preempted_pages import PreemptionPolicy
from rayfin.actors.scheduler.queues.preparation import Preparations
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.actors.scheduler.sessions.seats import Seats


class Lifecycle:
    """Moves requests between queue, slots and page tables, and records it for the runners."""

    def __init__(
        self,
        state: SchedulerState,
        preemption: PreemptionPolicy,
        preparations: Preparations,
        clock: Callable[[], float] = time.monotonic,
        tier: PageTier | None = None,
        seats: Seats | None = None,
    ) -> None:
        self.state = state
        self.preemption = preemption
        self.preparations = preparations
        self.tier = NoTier() if tier is None else tier
        self.seats = seats
        self.beside: list[Beside] = [preparations, self.tier]
        if seats is not None:
            self.beside.insert(1, seats)
        self.admission = Admission(state, preemption)
        self._ran: list[Request] = []  # when the runners were lost
        self._clock = clock

    def enqueue(self, request: Request) -> None:
        """Puts a new request into the queue, or lets it wait beside it first."""
        self.state.queue_limits.joined(request)
        self.queue(request)

    def queue(self, request: Request, place: int = 0) -> None:
        """Puts a request into the queue, unless it has to wait at one of the places from ``place``
        on in ``beside``."""
        if not any(beside.keeps(request) for beside in self.beside[place:]):
            self.admission.returning.discard(request)
            self.state.waiting.push(request)

    @property
    def num_beside(self) -> int:
        """Requests that wait beside the queue."""
        return sum(map(len, self.beside))

    def admit(self) -> int:
        """Starts the first waiting request, with pages for all its known tokens; returns its slot.

        Tokens of its cached prefix and those swapped in from host memory count as computed.
        """
        request = self.state.waiting.pop()
        prefix = self.admission.prefixes.find(request)
        assert prefix is not None, "admitted before its fork parent computed the prompt"
        cached = prefix.num_tokens
        slot = self.state.running.enter(request, self._client_number(request), cached)
        self.admission.prefixes.install(prefix, slot)
        grown = self.state.tables.reserve(slot, request.num_tokens)
        assert grown, "admitted without pages"
        self.preemption.restore(slot, len(prefix.pages))
        for _ in range(request.width - 1):
            self.state.running.reserve(request, self._client_number(request))
        self._entered(request, prefix)
        self.introduce(slot)
        return slot

    def _entered(self, request: Request, prefix: CachedPrefix) -> None:
        """Counts an admission. The queue charges the first one: what is not cached."""
        first, cached = not request.admitted, prefix.num_tokens
        if first:
            request.cached_tokens = cached
        self.state.waiting.entered(request)
        if self.seats is not None:
            self.seats.admitted(request)
        if not first:
            return
        self.state.queue_limits.left(request)
        request.admitted_at = self._clock()
        self.state.counters.admitted(request)
        if prefix.fork_parent is None:
            self.state.counters.prefix_queries += request.num_tokens
            self.state.counters.prefix_hits += cached

    def introduce(self, slot: int) -> None:
        """Sends the slot's request to the runners with the first step that has a row of it."""
        running, source = self.state.running, self.state.running.request(slot).source
        known = running.tokens[slot, : running.num_known[slot]]
        needs_history = source.sampling.needs_history or self.state.runner_diff.send_history
        needs_history = needs_history or any(part.needs_history for part in source.parts)
        self.state.runner_diff.enter(
            NewRequest(
                handle=slot,
                sampling=source.sampling,
                cap=int(running.stops.cap[slot]),
                stop_token_ids=source.stopping.stop_token_ids,
                history=known.copy() if needs_history else None,
                prompt_len=len(source.prompt),
                extra_keys=source.prefix_keys,
                tenant=source.tenant,
                parts=source.parts,
            )
        )

    def publish(self, slot: int, num_tokens: int) -> None:
        """Lets others share the pages of the slot's first ``num_tokens`` tokens."""
        request = self.state.running.request(slot)
        if self.state.tables.index is not None and not request.mixed:
            tokens = self.state.running.tokens[slot, :num_tokens]
            request.chain.extend(tokens)
            self.state.tables.publish(slot, request.chain, tokens)

    def computed(self, requests: Sequence[Request], now: float) -> None:
        """The prompts of running requests are computed, and have their first tokens."""
        self.state.counters.first_tokens(requests, now)
        for request in requests:
            slot, pin = request.slots[0], request.source.pin
            if request.mixed:
                continue
            self.tier.store_prompt(slot)
            if pin is not None:
                self.state.tables.pin(slot, pin.tokens, request.source.tenant, now + pin.seconds)

    def save_state(self, slot: int) -> int:
        """Saves the slot's state if a snapshot is due; returns where its next chunk has to end."""
        running, snapshots = self.state.running, self.state.snapshots
        computed, known = int(running.num_computed[slot]), int(running.num_known[slot])
        if snapshots is None or running.request(slot).mixed:
            return known
        latest = snapshots.latest.get(slot, 0)
        if snapshots.is_due(computed, known, latest):
            snapshots.latest[slot] = latest = computed
            hashes = running.request(slot).chain.hashes
            saved = snapshots.add(hashes[computed // self.state.tables.page_size - 1])
            if saved is not None:
                self.state.moves.add(STATE_SAVE, [slot], [saved])
        return snapshots.next_end(computed, known, latest)

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, and the states that go with it."""
        self.state.tables.reset_prefix_cache()
        self.forget_states()
        if self.seats is not None:
            self.seats.forget()

    def forget_states(self) -> None:
        """Resets the snapshots of states, after an error in computing one."""
        if self.state.snapshots is not None:
            self.state.snapshots.clear()

    def preempt(self, slot: int) -> None:
        """Frees slots and pages of the slot's request and puts it back into the queue.

        Its tokens are kept, but a beam search starts again from its prompt. Tokens of steps in
        flight are dropped and sampled again: sampling depends on (seed, position) alone, and they
        were not delivered.
        """
        request = self.state.running.request(slot)
        if not request.mixed:
            self.preemption.keep(slot)
        self._leave(request)
        self.state.waiting.push(request)
        request.preemptions += 1
        self.state.counters.preemptions += 1

    def finish(self, request: Request, reason: str, *, spoiled: bool = False) -> None:
        """Ends the request, running or waiting; no other reuses what it computed if ``spoiled``."""
        request.ended = True
        search = request.search
        if request.slot is None:
            self.admission.returning.discard(request)
            if not any(beside.discard(request) for beside in self.beside):
                self.state.waiting.discard(request)
            self.preemption.forget(request)
            self.state.queue_limits.left(request)
        else:
            if spoiled:
                for slot in request.slots:
                    self.state.tables.invalidate(slot)
            self._leave(request, share=not spoiled, ends=True)
        self.state.counters.finished[reason] += 1
        if reason != "moved":
            hypotheses = search.hypotheses if search is not None else []
            generated = sum(len(one.tokens) for one in hypotheses) or len(request.output)
            self.state.counters.ended(request, generated, reason, self._clock())

    def requeue(self, request: Request) -> None:
        """Puts the running request back into the queue; what it computed is discarded."""
        self._put_back(request)
        self.state.counters.requeued_by_restart += 1

    def _put_back(self, request: Request) -> None:
        for slot in request.slots:
            self.state.tables.invalidate(slot)
        self._leave(request, share=False)
        self.state.waiting.push(request)

    def carry_over(self, digest: str) -> None:
        """Requeues all that runs, to be computed by other weights; the runners stay.

        Args:
            digest: of these weights.
        """
        for request in self.state.running.holders():
            self._put_back(request)
        self.state.moves.clear()
        self._turn(digest)

    def keep_over(self, digest: str) -> None:
        """Lets all that runs go on over its pages, by other weights; no other request reads those.

        A beam search compares scores, which are of one version: it begins again.
        """
        for request in self.state.running.holders():
            if request.source.beams is None:
                request.mixed = True
            else:
                self._put_back(request)
        self._turn(digest)

    def _turn(self, digest: str) -> None:
        """Forgets what was computed by the weights before."""
        self.forget_prefixes()
        self.preemption.clear()
        self.tier.turn(digest)

    def restart(self) -> None:
        """Requeues all that ran: the runners end or sleep, and their caches are lost."""
        self._ran = self.state.running.holders()
        for request in self._ran:
            self.requeue(request)
        for beside in self.beside:
            for request in beside.restart():
                self.state.waiting.push(request)
        self.admission.returning.clear()
        self.forget_prefixes()
        self.state.counters.restart()
        self.state.runner_diff.clear()
        self.state.moves.clear()
        self.preemption.clear()

    def resume(self) -> None:
        """There are runners again: requests that ran first read what a disk has of them.

        Those that read when the runners died do not: reading may have killed them. In an engine
        that sleeps none ran.
        """
        for request in self._ran:
            if self.tier.keeps(request):
                self.admission.returning.add(request)
                self.state.waiting.discard(request)
        self._ran = []

    def make_room(self, slots: Int64Array) -> tuple[Int64Array, bool]:
        """Grows the page tables of the decoding ``slots`` [N] by a token each.

        If pages run out, the last request in order (``victim``) is preempted, possibly the one that
        needs the page. Only rows that cross a page boundary are visited one by one.

        Returns:
            The slots [M <= N] that can decode now, and whether a request was preempted.
        """
        running, tables = self.state.running, self.state.tables
        self._publish_decoded(slots)
        full = running.num_computed[slots] >= tables.held[slots].astype(np.int64) * tables.page_size
        crossing = slots[full]
        preempted = tables.windowed and self._slide(slots)
        if preempted:
            slots = slots[running.admission[slots] > 0]
            crossing = crossing[running.admission[crossing] > 0]
        if tables.append_pages(crossing):
            return slots, preempted
        for slot in crossing.tolist():
            while running.admission[slot] and not tables.grow(
                slot, int(running.num_computed[slot]) + 1
            ):
                self.preempt(self.victim())
                preempted = True
        if preempted:
            slots = slots[running.admission[slots] > 0]
        return slots, preempted

    def _slide(self, decoding: Int64Array) -> bool:
        """Frees pages behind windows: of slots that decode, and of all whose prompt is computed.

        Those get pages for their next chunk: as many as were freed, unless others share these.
        Then the last request in order is preempted.

        Returns:
            Whether one was.
        """
        running, tables = self.state.running, self.state.tables
        # Tokens on their way may be taken back, but none that is known.
        sure = np.minimum(running.num_computed[decoding], running.num_known[decoding] - 1)
        tables.slide_all(decoding, sure)
        preempted = False
        for slot in list(running.prefilling):
            if not running.admission[slot]:
                continue
            tables.slide(slot, int(running.num_computed[slot]))
            while running.admission[slot] and not tables.reserve(
                slot, int(running.num_known[slot])
            ):
                self.preempt(self.victim())
                preempted = True
        return preempted

    def _publish_decoded(self, slots: Int64Array) -> None:
        """Publishes the pages that decoding has filled, of which all tokens are known.

        The last known token is not an input yet. Beams drop pages.
        """
        running, tables = self.state.running, self.state.tables
        if tables.index is None:
            return
        ready = (running.num_known[slots] - 1) // tables.page_size > tables.published[slots]
        for slot in slots[ready & ~running.lockstep[slots]].tolist():
            self.publish(slot, int(running.num_known[slot]) - 1)

    def victim(self) -> int:
        """The slot to preempt: the last request by the policy's order, so the first advances."""
        running = self.state.running
        requests = [running.request(slot) for slot in running.slots()]
        return self.state.waiting.victim(requests).slots[0]

    def _leave(self, request: Request, *, share: bool = True, ends: bool = False) -> None:
        """Frees the request's slots; other requests may reuse what they computed if ``share``, and
        later ones what it leaves on a disk if it ``ends``."""
        running = self.state.running
        self.state.waiting.left(request)
        for slot in list(request.slots):
            # Pages that decoding filled are hashed only here, not in every step: they are looked
            # up later, by the next turn of a conversation or the same request after a preemption.
            if share and not (running.lockstep[slot] or request.mixed):
                known, computed = int(running.num_known[slot]), int(running.num_computed[slot])
                self.publish(slot, min(computed, known - 1))  # the last token is not an input
                if ends:
                    self.tier.store(slot)
            if ends and self.seats is not None:
                self.seats.left(request, slot, share=share and not request.mixed)
            running.leave(slot)
            self.vacate(slot)
        request.search, request.mixed = None, request.mixed and ends

    def vacate(self, slot: int) -> None:
        """Frees the slot's pages, and removes it from the runners."""
        self.state.tables.release(slot)
        self.state.runner_diff.leave(slot)

    def _client_number(self, request: Request) -> int:
        clients = self.state.clients
        return clients.setdefault(request.source.client, len(clients))

"""The only transitions of a request besides a step: admit, preempt, finish.

        add                admit
(door) ─────► waiting ───────────────► running ─────► finished
                 ▲                        │   finish
                 └────────────────────────┘
                          preempt
"""

from collections import Counter

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import NewRequest
from rayfin.actors.scheduler.page_moves import PageMoves
from rayfin.actors.scheduler.queues import WaitingQueue
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.running import RunningTable
from rayfin.actors.scheduler.swap import PreemptionPolicy, Recompute, Swap
from rayfin.cache.page_tables import PageTables


class Lifecycle:
    """Moves requests between queue, slots and page tables, and notes it for the runners."""

    def __init__(self, config: EngineConfig) -> None:
        slots = config.limits.max_decoding_batch
        self.waiting = WaitingQueue(config.policy)
        self.running = RunningTable(slots, config.max_model_len)
        self.tables = PageTables(
            slots, config.num_pages, config.page_size, prefix_caching=config.prefix_caching
        )
        self.moves = PageMoves()
        self.preemption: PreemptionPolicy = (
            Swap(config.num_host_pages, self.running, self.tables, self.moves)
            if config.num_host_pages
            else Recompute()
        )
        self.clients: list[str] = []  # by the index that RunningTable.client holds
        self.num_preemptions = 0  # for want of pages
        self.num_requeued = 0  # because the runners were replaced
        self.num_finished: Counter[str] = Counter()  # by finish reason
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._client_index: dict[str, int] = {}
        self._new: list[NewRequest] = []
        self._forgotten: list[int] = []

    def can_admit(self, request: Request, spare: int) -> bool:
        """Whether a slot is free, and pages for its tokens and one more, with ``spare`` left."""
        if not self.running.has_free_slot:
            return False
        hits = self.tables.match(request.chain, request.tokens())
        missing = self.tables.pages_for(request.num_tokens + 1) - len(hits)
        return missing + spare <= self.tables.num_free_without(hits)

    def admit(self) -> int:
        """The first waiting request starts to run, with pages for all its known tokens.

        What the prefix index knows of them counts as computed, and so does what comes back from
        host memory.
        """
        request = self.waiting.pop()
        hits = self.tables.match(request.chain, request.tokens())
        cached = len(hits) * self.tables.page_size
        slot = self.running.enter(request, self._client(request.source.client), cached)
        self.tables.adopt(slot, hits)
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = cached
            self.prefix_queries += request.num_tokens
            self.prefix_hits += cached
        grown = self.tables.grow(slot, request.num_tokens)
        assert grown, "admitted without pages"
        self.preemption.restore(slot, len(hits))
        stopping = request.source.stopping
        cap = int(self.running.cap[slot])
        self._new.append(NewRequest(slot, request.source.sampling, cap, stopping.stop_token_ids))
        return slot

    def publish(self, slot: int, num_tokens: int) -> None:
        """The slot's first ``num_tokens`` tokens are known and scheduled: others may share them."""
        if self.tables.index is not None:
            request = self.running.request(slot)
            tokens = self.running.tokens[slot, :num_tokens]
            request.chain.extend(tokens)
            self.tables.publish(slot, request.chain, tokens)

    def preempt(self, slot: int) -> None:
        """Frees the slot and the pages, keeps the tokens: the request is resumed later.

        Tokens of steps in flight are dropped when they come and sampled again: sampling depends on
        (seed, position) alone, and nobody has seen them.
        """
        self.preemption.keep(slot)
        self.waiting.push(self._leave(slot))
        self.num_preemptions += 1

    def finish(self, request: Request, reason: str) -> None:
        """The request ends, wherever it is."""
        if request.slot is None:
            self.waiting.discard(request)
            self.preemption.forget(request)
        else:
            if reason == "error":
                self.tables.retract(request.slot)
            self._leave(request.slot)
        self.num_finished[reason] += 1

    def take_news(self) -> tuple[list[NewRequest], list[int]]:
        """What the runners must hear with the next step: first sights, and slots to forget."""
        news = self._new, self._forgotten
        self._new, self._forgotten = [], []
        return news

    def restart(self) -> None:
        """The runners are new and empty: everything that ran is recomputed."""
        for slot in self.running.slots():
            self.waiting.push(self._leave(slot))
            self.num_requeued += 1
        if self.tables.index is not None:
            self.tables.index.clear()
        self.take_news()
        self.moves.clear()
        self.preemption.clear()

    def victim(self) -> int:
        """The slot to preempt: lowest priority, latest arrival. So the oldest always advances."""
        running = self.running
        return max(running.slots(), key=lambda slot: self.waiting.rank(running.request(slot)))

    def _leave(self, slot: int) -> Request:
        request = self.running.leave(slot)
        self.tables.release(slot)
        self._forgotten.append(slot)
        return request

    def _client(self, name: str) -> int:
        if name not in self._client_index:
            self._client_index[name] = len(self.clients)
            self.clients.append(name)
        return self._client_index[name]

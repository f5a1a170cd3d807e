"""Which engine takes a request."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

import numpy as np

from rayfin.actors.adapters.part import AdapterRef, short
from rayfin.actors.messages import EngineRequest, PagesAt
from rayfin.actors.timing import SENT_SECONDS
from rayfin.cache.prefix_index import Digests, HashChain, digests_of

RUNNING_TOKENS = 64
"""A running request's share of an engine, in prompt tokens that wait: what it may yet sample."""


ADAPTER_TOKENS = 256
"""What an engine without a request's adapter costs more: it reads it, and may give up
another one for it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that takes requests, as one ingress sees it."""

    name: str
    running: int = 0  # requests, of all ingresses, at its last heartbeat
    waiting: int = 0
    waiting_tokens: int = 0  # of prompts
    sent: int = 0  # requests that this ingress has sent it since
    sent_tokens: int = 0
    page_size: int = 16  # of its cache, in tokens
    num_pages: int = 0
    adapters: frozenset[str] = frozenset()  # short digests of those that its runner holds
    sessions: frozenset[bytes] = frozenset()  # digests of those whose pages it keeps
    unclaimed: int | None = None  # free pages that it keeps for no session; None: it has not said
    draining: bool = False
    prefill: bool = False  # it computes long prompts for the others, to which their streams move
    prompt_seconds: float = 0.0  # of 1,000 tokens of a prompt; 0.0: it has computed none
    read_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)  # EngineStats'
    # Of all pages in its cache at its last heartbeat; None: it has not said.
    held: Digests | None = field(default=None, compare=False)

    @property
    def load(self) -> int:
        """Work ahead of a newcomer, in tokens."""
        requests = self.running + self.waiting + self.sent
        return self.waiting_tokens + self.sent_tokens + RUNNING_TOKENS * requests

    def work_for(self, request: EngineRequest) -> int:
        """The load, and what it costs to read the request's adapter if the engine has it not."""
        adapter = request.part(AdapterRef)
        missing = adapter is not None and short(adapter.digest) not in self.adapters
        return self.load + ADAPTER_TOKENS * missing


class Router(Protocol):
    """Decides where a request runs; knows no connection and sends nothing."""

    def pick(self, request: EngineRequest, candidates: Sequence[Candidate]) -> Candidate:
        """One of the candidates, of which there is at least one.

        It may note in ``request.pages_at`` which other one has more of the prompt.
        """
        ...

    def next_home(
        self, request: EngineRequest, at: Candidate, candidates: Sequence[Candidate]
    ) -> Candidate | None:
        """Where a stream that runs ``at`` an engine goes on instead; None: it stays.

        Args:
            request: the tokens so far are its prompt.
        """
        homes = [candidate for candidate in candidates if not candidate.prefill]
        if at.draining:
            homes = homes or list(candidates)
        return self.pick(request, homes) if homes and (at.draining or at.prefill) else None


class LeastLoaded(Router):
    """The engine with the least work; those that are even take turns."""

    def __init__(self) -> None:
        self._last = ""

    def pick(self, request: EngineRequest, candidates: Sequence[Candidate]) -> Candidate:
        chosen = cheapest(candidates, lambda candidate: candidate.work_for(request), self._last)
        self._last = chosen.name
        return chosen


def cheapest(
    candidates: Sequence[Candidate], cost: Callable[[Candidate], int], last: str
) -> Candidate:
    """The candidate of the least cost; of even ones the next after the one named ``last``."""
    least = min(map(cost, candidates))
    even = sorted(
        (candidate for candidate in candidates if cost(candidate) == least),
        key=lambda candidate: candidate.name,
    )
    return next((candidate for candidate in even if candidate.name > last), even[0])


# Which engine takes a request: the one that has its prompt's head in the cache, if it has time.
#
# Engines say with each heartbeat what they hold. What came to them since, or waits there, each
# ingress remembers by the very hashes that the engines' caches go by, for a while. Of an engine
# that does not say, its cache being too large, it remembers as much as fits there, least recently
# used forgotten first; it is wrong where another ingress or a restart has changed a cache, and then
# a prompt is computed once more. Load against cached tokens in one sum is
# Preble's (arXiv:2407.00023) and SGLang's router's idea. Of sessions the engines themselves say
# with each heartbeat whose pages they keep, so all ingresses agree; and how many pages are free,
# for an engine without room makes another session wait.

CACHED_WEIGHT = 2
"""A cached token is worth so much work ahead: to compute it elsewhere takes time, and pages there
that others' prefixes have."""


def held_of(wanted: Digests, held: Digests | None) -> int:
    """How many of the first ``wanted`` [N] are among ``held``, which are sorted."""
    if held is None or not len(held):
        return 0
    places = np.minimum(np.searchsorted(held, wanted), len(held) - 1)
    return int(np.logical_and.accumulate(held[places] == wanted).sum())


class SentPages:
    """Hashes of pages that one engine should have, at most as many as it has pages."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, float] = OrderedDict()  # and when they were sent

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[bytes], since: float = 0.0) -> int:
        """How many of the first ``hashes`` were sent ``since`` a time."""
        for number, page in enumerate(hashes):
            if self._hashes.get(page, -math.inf) < since:
                return number
        return len(hashes)

    def add(self, hashes: Sequence[bytes], limit: int, now: float = 0.0) -> None:
        """It has these ``now``; heads are forgotten last, as by the engines' page pools."""
        for page in reversed(hashes):
            self._hashes[page] = now
            self._hashes.move_to_end(page)
        while len(self._hashes) > limit:
            self._hashes.popitem(last=False)


class PrefixAware(Router):
    """The engine with the least work ahead, where what is cached counts as work done.

    A session's prompt counts as cached at the engine that keeps its pages. What an engine has no
    free pages for counts as work, of those whose pages it takes. A new session goes to one of the
    engines that are even by the same draw at all ingresses.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[str, SentPages] = {}  # by engine; names are numbers, so they are few
        self._last = ""

    def pick(self, request: EngineRequest, candidates: Sequence[Candidate]) -> Candidate:
        request.pages_at = None
        if len(candidates) == 1:  # nothing to learn from, and a long prompt takes a while to hash
            return candidates[0]
        page_size, session = candidates[0].page_size, request.session
        chain = HashChain(page_size, request.prefix_keys)
        chain.extend(request.prompt)
        digest = None if session is None else session.digest(request.tenant)
        now, digests = self._clock(), digests_of(chain.hashes)
        matched = {
            engine.name: max(
                self._of(engine).match(
                    chain.hashes, 0.0 if engine.held is None else now - SENT_SECONDS
                ),
                held_of(digests, engine.held),
            )
            for engine in candidates
        }

        def cost(engine: Candidate) -> int:
            cached = matched[engine.name]
            if digest is None:
                return engine.work_for(request) - CACHED_WEIGHT * page_size * cached
            if digest in engine.sessions:
                cached = len(chain.hashes)
            missing = len(chain.hashes) - cached
            taken = 0 if engine.unclaimed is None else max(missing - engine.unclaimed, 0)
            return engine.work_for(request) + page_size * (taken - CACHED_WEIGHT * cached)

        homes = [candidate for candidate in candidates if not candidate.prefill] or candidates
        if digest is None:
            chosen = cheapest(homes, cost, self._last)
        else:
            chosen = min(homes, key=lambda engine: (cost(engine), _draw(digest, engine)))
        if len(homes) < len(candidates) and may_part(request):
            away = cheapest(
                [candidate for candidate in candidates if candidate.prefill], cost, self._last
            )
            size = len(request.prompt)
            missing = [size - page_size * matched[engine.name] for engine in (chosen, away)]
            if pays_apart(chosen, away, *missing):
                chosen = away
        self._last = chosen.name
        holder = max(matched, key=lambda name: matched[name])
        if matched[holder] > matched[chosen.name]:
            request.pages_at = PagesAt(holder, matched[holder])
        self._of(chosen).add(chain.hashes, chosen.num_pages, now)
        return chosen

    def _of(self, candidate: Candidate) -> SentPages:
        return self._sent.setdefault(candidate.name, SentPages())


MOVED_TOKENS = 32
"""Of a stream that moves, about two pages: its new home computes what has no name yet."""


def may_part(request: EngineRequest) -> bool:
    """Whether a request may begin at one engine and go on at another one."""
    whole = request.beams is not None or request.background or not request.samples
    whole = whole or request.sampling.prompt_logprobs is not None
    return not (whole or any(part.computes_all for part in request.parts))


def pays_apart(home: Candidate, away: Candidate, missing: int, missing_away: int) -> bool:
    """Whether to compute a prompt ``away`` and to read it from there costs less than at ``home``.

    At home each stream waits while it is computed, so its seconds count for each of them too.

    Args:
        missing, missing_away: tokens of the prompt that the two have not in their caches.
    """
    pace = home.prompt_seconds or away.prompt_seconds
    reading = home.read_seconds.get(away.name, home.read_seconds.get("", math.inf))
    if not pace or (home.unclaimed or 0) * home.page_size < missing:
        return False
    stalled = 1 + home.running
    queue = pace * (home.waiting_tokens + home.sent_tokens)
    apart = (away.prompt_seconds or pace) * (away.waiting_tokens + away.sent_tokens + missing_away)
    # What it has to compute at home waits in the queue there as well.
    apart = max(apart + reading * missing, queue)
    return apart + pace * MOVED_TOKENS * stalled < queue + pace * missing * stalled


def _draw(digest: bytes, candidate: Candidate) -> bytes:
    """The session's ticket at an engine: of even engines the lowest wins."""
    return sha256(digest + candidate.name.encode()).digest()

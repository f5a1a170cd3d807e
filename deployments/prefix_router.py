"""Which engine takes a request: the one that has its prompt's head in the cache, if it has time.

Each ingress remembers which pages it has sent where, by the very hashes that the engines' caches go
by, and forgets them as an engine would, least recently used first. So it knows what is cached
without a message more; it is wrong where another ingress or a restart has changed a cache, and then
a prompt is computed once more. Load against cached tokens in one sum is Preble's (arXiv:2407.00023)
and SGLang's router's idea; sessions are placed by rendezvous hashing, on which all ingresses agree.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

from rayfin.actors.messages import EngineRequest
from rayfin.cache.prefix_index import HashChain
from rayfin.deployments.router import Candidate, cheapest

CACHED_WEIGHT = 2
"""A cached token is worth so much work ahead: to compute it elsewhere takes time, and pages there
that others' prefixes have."""


class SentPages:
    """Hashes of pages that one engine should have, at most as many as it has pages."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes`` it has."""
        for number, page in enumerate(hashes):
            if page not in self._hashes:
                return number
        return len(hashes)

    def add(self, hashes: Sequence[bytes], most: int) -> None:
        """It has these now; heads are forgotten last, as by the engines' page pools."""
        for page in reversed(hashes):
            self._hashes[page] = None
            self._hashes.move_to_end(page)
        while len(self._hashes) > most:
            self._hashes.popitem(last=False)


class PrefixAware:
    """The engine with the least work ahead, where what is cached counts as work done.

    A request of a session goes to the session's engine as long as that takes requests at all.
    """

    def __init__(self) -> None:
        self._sent: dict[str, SentPages] = {}  # by engine; names are numbers, so they are few
        self._last = ""

    def pick(self, request: EngineRequest, candidates: Sequence[Candidate]) -> Candidate:
        if len(candidates) == 1:  # nothing to learn from, and a long prompt takes a while to hash
            return candidates[0]
        page_size = candidates[0].page_size
        chain = HashChain(page_size, request.extra_keys)
        chain.extend(request.prompt)
        if request.session:
            chosen = max(candidates, key=lambda own: _draw(request, own))
        else:
            saved = {
                own.name: CACHED_WEIGHT * page_size * self._of(own).match(chain.hashes)
                for own in candidates
            }
            chosen = cheapest(candidates, lambda own: own.load - saved[own.name], self._last)
        self._last = chosen.name
        self._of(chosen).add(chain.hashes, chosen.num_pages)
        return chosen

    def _of(self, candidate: Candidate) -> SentPages:
        return self._sent.setdefault(candidate.name, SentPages())


def _draw(request: EngineRequest, candidate: Candidate) -> bytes:
    """The session's ticket at an engine: the highest wins."""
    words = (request.tenant, request.session, candidate.name)
    return sha256("\0".join(words).encode()).digest()

"""Ends outputs that repeat themselves: vLLM's ``repetition_detection``."""

from collections.abc import Iterator

import numpy as np

from rayfin.actors.messages import NO_TOKEN, Int32Array, Int64Array, Repetition
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.running_table import RunningTable

REASON, DETAIL = "repetition", "repetition_detected"


class OutputRepeats:
    """One output, read token by token.

    For each length of a pattern it counts for how many tokens the output has been equal to itself
    that many tokens before. A pattern of p tokens stands c times at the end as soon as the count at
    distance p is p (c - 1). So a token costs two vector operations over the lengths, whatever the
    output is.
    """

    def __init__(self, rule: Repetition) -> None:
        self._shortest, self._after = rule.shortest, rule.after
        lengths = np.arange(rule.shortest, rule.longest + 1)
        self._needed = lengths * (rule.copies - 1)
        self._equal: Int64Array = np.zeros(len(lengths), np.int64)
        self._tail: Int32Array = np.full(rule.longest, NO_TOKEN, np.int32)  # the newest first
        self._count = 0

    def push(self, token: int) -> bool:
        """Adds a token; returns whether the output repeats itself now."""
        same = self._tail[self._shortest - 1 :] == token
        self._equal += 1
        self._equal *= same
        self._tail[1:] = self._tail[:-1]
        self._tail[0] = token
        self._count += 1
        return self._count >= self._after and bool((self._equal >= self._needed).any())


class RepetitionWatch:
    """The outputs of live requests that ask for it; most engines have none."""

    def __init__(self) -> None:
        self.watched: dict[Request, OutputRepeats] = {}

    def watch(self, request: Request, rule: Repetition) -> None:
        """Watches a request that asks for it."""
        repeats = self.watched[request] = OutputRepeats(rule)
        for token in request.source.output:
            repeats.push(token)

    def repeating(
        self, running: RunningTable, slots: Int64Array, tokens: Int32Array
    ) -> Iterator[Request]:
        """Yields the requests of ``slots`` [N] that repeat themselves with ``tokens`` [N].

        A request that has ended with its token holds no slot any more.
        """
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            request = running.requests[slot]
            repeats = None if request is None else self.watched.get(request)
            if request is not None and repeats is not None and repeats.push(token):
                yield request

"""A request whose engine may be lost: its output so far, and the request for the next engine.

The recipe of a replay is the token log: prompt plus tokens so far, as one longer prompt. Sampling
depends on (seed, position) alone, so the tokens that follow are the ones that would have followed.
"""

from dataclasses import replace

import numpy as np

from rayfin.actors.errors import DeadlineExceeded
from rayfin.actors.messages import EngineRequest, Int32Array, TokenDelta
from rayfin.actors.weights.spans import SpanLog

KEY_STEP = 0x2545F4914F6CDD1D  # odd: the keys of a request's attempts are far apart
KEY_MASK = 2**62 - 1  # keys travel as int64


class Replay:
    """One request's tokens so far, over all engines that have worked on it.

    Args:
        source: the request as its consumer made it.
        now: seconds; its timeout counts from here.
    """

    def __init__(self, source: EngineRequest, now: float) -> None:
        self._source = source
        self._started = now
        self._output = list(source.output)
        self._spans = SpanLog(source.spans)
        unscored = source.sampling.prompt_logprob_start + 1
        self._prompt_delivered = np.arange(len(source.prompt)) < unscored  # its log probabilities
        self._advanced = False  # whether the current attempt has produced a token
        self._lost = False  # and no delta since
        self.waiting_since = now
        self.attempts = 0
        self.deaths = source.deaths

    @property
    def begun(self) -> bool:
        """Whether it has output."""
        return bool(self._output)

    @property
    def tokens(self) -> Int32Array:
        """Its prompt, and the output so far."""
        return np.concatenate([self._source.prompt, np.array(self._output, np.int32)])

    @property
    def underway(self) -> bool:
        """See ``EngineRequest``."""
        return self._source.underway

    def attempt(self, now: float) -> EngineRequest:
        """The request to send next.

        Each attempt has a fresh key, so late output of an earlier attempt is dropped. Choices of
        one prompt that are lost together have equal numbers of attempts, so their keys still match.

        Raises:
            DeadlineExceeded: the request's own deadline has passed.
        """
        source = self._source
        sampling = source.sampling
        if self._prompt_delivered.all():
            sampling = replace(sampling, prompt_logprobs=None)
        fork_parent = source.parent_key
        request = replace(
            source,
            key=self._key(source.key),
            parent_key=None if fork_parent is None else self._key(fork_parent),
            output=list(self._output),
            spans=self._spans.spans,
            timeout=self.left(now),
            sampling=sampling,
            deaths=self.deaths,
        )
        self.attempts += 1
        self._advanced = False
        return request

    def left(self, now: float) -> float | None:
        """Seconds until the request's own deadline, None if it has none.

        Raises:
            DeadlineExceeded: it has passed.
        """
        timeout = self._source.timeout
        if timeout is None:
            return None
        left = self._started + timeout - now
        if left <= 0:
            raise DeadlineExceeded(
                f"the request's timeout of {timeout:g} s has passed: its engine was lost, and no "
                "other engine had continued it by then",
                "timeout",
            )
        return left

    def accept(self, delta: TokenDelta, now: float) -> TokenDelta:
        """Records a delta of the current attempt, and removes what was delivered before."""
        self._lost, self.waiting_since = False, now
        self._output += delta.tokens
        self._spans.add(delta.weights, len(delta.tokens), kept=delta.kept)
        self._advanced = self._advanced or bool(delta.tokens)
        if delta.prompt_logprobs:
            delivered = self._prompt_delivered
            delta.prompt_logprobs = {
                at: entry for at, entry in delta.prompt_logprobs.items() if not delivered[at]
            }
            delivered[list(delta.prompt_logprobs)] = True
        if self.attempts > 1:  # its output may have been cached as well
            delta.cached_tokens = min(delta.cached_tokens, len(self._source.prompt))
        return delta

    def lost(self, now: float) -> None:
        """The current attempt failed: the request waits from now on, unless it did already."""
        if not self._lost:
            self._lost, self.waiting_since = True, now

    def died(self) -> None:
        """The engine has died with the request.

        Only deaths in a row count: a request that advanced since the last death did not cause it.
        """
        self.deaths = 1 if self._advanced else self.deaths + 1

    def _key(self, first: int) -> int:
        return (first + self.attempts * KEY_STEP) & KEY_MASK

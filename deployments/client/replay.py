"""A request whose engine may be lost: what it has been told, and what to ask the next engine.

The recipe of a replay is the token log: prompt plus tokens so far, as one longer prompt. Sampling
depends on (seed, position) alone, so the tokens that follow are the ones that would have followed.
"""

from dataclasses import replace

import numpy as np

from rayfin.actors.errors import DeadlineExceeded
from rayfin.actors.messages import EngineRequest, TokenDelta

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
        self._prompt_told = np.zeros(len(source.prompt), np.bool_)  # its log probabilities
        self._told_since = False  # a token, since the last attempt began
        self._lost = False  # and no news since
        self.waiting_since = now
        self.attempts = 0
        self.deaths = source.deaths

    @property
    def begun(self) -> bool:
        """Whether there are tokens of it."""
        return bool(self._output)

    def attempt(self, now: float) -> EngineRequest:
        """What to send next, under a key that no attempt before had: late news are nobody's.

        Siblings that are lost together have as many attempts, so they still find each other.

        Raises:
            DeadlineExceeded: the request's own time is over.
        """
        source = self._source
        sampling = source.sampling
        if self._prompt_told[1:].all():
            sampling = replace(sampling, prompt_logprobs=None)
        fork_parent = source.parent_key
        request = replace(
            source,
            key=self._key(source.key),
            parent_key=None if fork_parent is None else self._key(fork_parent),
            output=list(self._output),
            timeout=self.left(now),
            sampling=sampling,
            deaths=self.deaths,
        )
        self.attempts += 1
        self._told_since = False
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
                "other one had gone on with it by then",
                "timeout",
            )
        return left

    def accept(self, delta: TokenDelta, now: float) -> TokenDelta:
        """Notes the news of the attempt under way; what was told before is left out of them."""
        self._lost, self.waiting_since = False, now
        self._output += delta.tokens
        self._told_since = self._told_since or bool(delta.tokens)
        if delta.prompt_logprobs:
            told = self._prompt_told
            delta.prompt_logprobs = {
                at: entry for at, entry in delta.prompt_logprobs.items() if not told[at]
            }
            told[list(delta.prompt_logprobs)] = True
        if self.attempts > 1:  # its own output may have been cached as well
            delta.cached_tokens = min(delta.cached_tokens, len(self._source.prompt))
        return delta

    def lost(self, now: float) -> None:
        """The attempt under way has come to nothing: it waits from now on, or from before."""
        if not self._lost:
            self._lost, self.waiting_since = True, now

    def died(self) -> None:
        """The engine has died with the request.

        Only deaths in a row count: one that got on since the last death was not its cause.
        """
        self.deaths = 1 if self._told_since else self.deaths + 1

    def _key(self, first: int) -> int:
        return (first + self.attempts * KEY_STEP) & KEY_MASK

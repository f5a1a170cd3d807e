"""How much may wait: beyond it a newcomer is told to come back later."""

import math
from collections import deque

from rayfin.actors.errors import Overloaded
from rayfin.actors.scheduler.state.request import Request


class QueueLimits:
    """Counts what waits for its first admission, in requests and in prompt tokens.

    What was admitted once and waits again (a preemption, new runners) is not counted: it has its
    place already, and trouble inside must not turn newcomers away.
    """

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._max_requests = max_requests
        self._max_tokens = max_tokens

    def check(self, prompt_len: int, retry_after: int | None = None) -> None:
        """Whether a prompt of so many tokens may join; ``retry_after`` seconds go into a refusal.

        A queue with nobody in it takes any prompt, or one over ``max_tokens`` could never run.

        Raises:
            Overloaded: it would be one too many; the message names the limit.
        """
        if self.num_requests >= self._max_requests:
            raise Overloaded(
                f"{self.num_requests} requests are waiting already, "
                f"of at most {self._max_requests} (max_waiting_requests)",
                retry_after=retry_after,
            )
        most = self._max_tokens
        if most is not None and self.num_requests and self.num_tokens + prompt_len > most:
            raise Overloaded(
                f"{self.num_tokens} prompt tokens are waiting already; with this prompt's "
                f"{prompt_len} they would be over {most} (max_waiting_tokens)",
                retry_after=retry_after,
            )

    def joined(self, request: Request) -> None:
        self.num_requests += 1
        self.num_tokens += len(request.source.prompt)

    def left(self, request: Request) -> None:
        """The request was admitted, or ended as it waited; nothing if it was admitted before."""
        if not request.admitted:
            self.num_requests -= 1
            self.num_tokens -= len(request.source.prompt)


# How fast requests end, and so when a refused one may try again.

WINDOW_SECONDS = 30.0
SAMPLE_SECONDS = 1.0
MAX_WAIT = 60  # seconds; also the answer while nothing ends


class CompletionRate:
    """The rate at which requests have ended lately, from a counter that somebody else keeps."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (seconds, requests ended until then)

    def observe(self, now: float, ended: int) -> None:
        """Takes note of the counter; cheap enough for every request."""
        samples = self._samples
        if samples and now - samples[-1][0] < SAMPLE_SECONDS:
            return
        samples.append((now, ended))
        while now - samples[0][0] > WINDOW_SECONDS and len(samples) > 2:
            samples.popleft()

    def seconds_until_half(self, waiting: int, now: float, ended: int) -> int:
        """Whole seconds, 1 to MAX_WAIT, until half of a queue of ``waiting`` has gone at this rate.

        Half, because all that are refused come back together.
        """
        if not self._samples or ended <= self._samples[0][1]:
            return MAX_WAIT
        start, before = self._samples[0]
        rate = (ended - before) / max(now - start, 1e-3)
        return max(1, min(MAX_WAIT, math.ceil(waiting / 2 / rate)))

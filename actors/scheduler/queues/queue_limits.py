"""How much may wait. Beyond it new requests are refused with a time to retry after."""

import math
from collections import deque
from collections.abc import Callable

from rayfin.actors.errors import Overloaded
from rayfin.actors.messages import EngineRequest
from rayfin.actors.scheduler.request import Request


class QueueLimits:
    """Counts what waits for its first admission, in requests and in prompt tokens.

    Background requests are not limited, and counted apart: their sender limits them.

    Requests that wait again after a preemption or new runners are not counted, since that must not
    refuse new requests.
    """

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_background_tokens = 0
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.spares: Callable[[EngineRequest], bool] = lambda _: False
        """Whom no full queue refuses, beside those that had been admitted elsewhere."""

    def check(self, prompt_len: int, retry_after: int | None = None) -> None:
        """Checks whether a prompt of ``prompt_len`` tokens may join.

        An empty queue accepts any prompt; otherwise one over ``max_tokens`` could never run.

        Raises:
            Overloaded: the queue is full; the message names the limit. Has ``retry_after`` seconds.
        """
        if self.num_requests >= self._max_requests:
            raise Overloaded(
                f"{self.num_requests} requests are waiting already, "
                f"of at most {self._max_requests} (max_waiting_requests)",
                retry_after=retry_after,
            )
        limit = self._max_tokens
        if limit is not None and self.num_requests and self.num_tokens + prompt_len > limit:
            raise Overloaded(
                f"{self.num_tokens} prompt tokens are waiting already; with this prompt's "
                f"{prompt_len} they would be over {limit} (max_waiting_tokens)",
                retry_after=retry_after,
            )

    def joined(self, request: Request) -> None:
        self._count(request, 1)

    def left(self, request: Request) -> None:
        """The request was admitted or ended; ignored if it was admitted before."""
        if not request.admitted:
            self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        tokens = sign * len(request.source.prompt)
        if request.source.background:
            self.num_background_tokens += tokens
        else:
            self.num_requests += sign
            self.num_tokens += tokens


WINDOW_SECONDS = 30.0
SAMPLE_SECONDS = 1.0
MAX_WAIT = 60  # seconds; also the answer while nothing ends


class CompletionRate:
    """The recent rate at which requests end, from samples of a counter."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (seconds, requests ended until then)

    def observe(self, now: float, ended: int) -> None:
        """Samples the counter; cheap enough for every request."""
        samples = self._samples
        if samples and now - samples[-1][0] < SAMPLE_SECONDS:
            return
        samples.append((now, ended))
        while now - samples[0][0] > WINDOW_SECONDS and len(samples) > 2:
            samples.popleft()

    def seconds_until_half(self, waiting: int, now: float, ended: int) -> int:
        """Whole seconds, 1 to MAX_WAIT, in which half of ``waiting`` requests end at this rate."""
        # Half, because all refused clients retry at the same time.
        if not self._samples or ended <= self._samples[0][1]:
            return MAX_WAIT
        start, before = self._samples[0]
        rate = (ended - before) / max(now - start, 1e-3)
        return max(1, min(MAX_WAIT, math.ceil(waiting / 2 / rate)))

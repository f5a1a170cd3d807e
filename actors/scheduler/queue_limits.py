"""How much may wait: beyond it a newcomer is told to come back later."""

from rayfin.actors.errors import Overloaded
from rayfin.actors.scheduler.request import Request


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

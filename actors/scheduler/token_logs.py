"""The tokens of requests that have ended, kept for whoever lost the connection to them."""

from collections import OrderedDict
from collections.abc import Callable

from rayfin.actors.messages import TokenLog
from rayfin.actors.scheduler.request import Request

KEPT_SECONDS = 60.0
MAX_TOKENS = 2**20  # of all logs: tens of megabytes
MAX_LOGS = 2**14


class TokenLogs:
    """Logs by request id, the oldest first; those of requests that have a receipt, no others."""

    def __init__(
        self,
        clock: Callable[[], float],
        seconds: float = KEPT_SECONDS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._max_tokens = max_tokens
        self._logs: OrderedDict[str, tuple[float, str, TokenLog]] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens kept, of all logs."""
        return self._num_tokens

    def __len__(self) -> int:
        return len(self._logs)

    def keep(
        self, request: Request, finish_reason: str | None = None, stop_reason: int | None = None
    ) -> None:
        """The request has left its slots; ``finish_reason`` None: before it was done."""
        source = request.source
        if source.receipt is None:
            return
        self._forget(source.request_id)
        log = TokenLog(
            source.receipt,
            source.sampling.seed,
            request.output,
            finish_reason,
            stop_reason,
            request.cached_tokens,
        )
        self._logs[source.request_id] = (self._clock(), source.tenant, log)
        self._num_tokens += len(log.tokens)
        self._expire()

    def find(self, tenant: str, request_id: str) -> TokenLog | None:
        """The log of the tenant's request, None if there is none or its time is over."""
        self._expire()
        _, owner, log = self._logs.get(request_id, (0.0, "", None))
        return log if owner == tenant else None

    def _expire(self) -> None:
        oldest = self._clock() - self._seconds
        while self._logs:
            request_id, (kept, _, _) = next(iter(self._logs.items()))
            few = len(self._logs) <= MAX_LOGS and self._num_tokens <= self._max_tokens
            if few and kept >= oldest:
                return
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if (found := self._logs.pop(request_id, None)) is not None:
            self._num_tokens -= len(found[2].tokens)

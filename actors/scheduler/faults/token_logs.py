"""Tokens of ended requests, kept for clients that lost the connection."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rayfin.actors.messages import Int32Array, Receipt, TokenLog
from rayfin.actors.scheduler.request import Request
from rayfin.actors.timing import TOKEN_LOG_SECONDS
from rayfin.actors.weights.spans import Spans
from rayfin.actors.weights.version import BASE_LABEL

MAX_TOKENS = 2**20  # of all logs: 4 MiB
MAX_LOGS = 2**14


@dataclass(slots=True)
class _Kept:
    """A log, its tokens as an array."""

    since: float  # seconds of the clock
    tenant: str
    receipt: Receipt
    seed: int
    tokens: Int32Array
    finish_reason: str | None
    stop_reason: int | str | None
    cached_tokens: int
    spans: Spans

    def log(self) -> TokenLog:
        return TokenLog(
            self.receipt,
            self.seed,
            self.tokens.tolist(),
            self.finish_reason,
            self.stop_reason,
            self.cached_tokens,
            self.spans,
        )


class TokenLogs:
    """Logs by request id, the oldest first; only of requests that have a receipt."""

    def __init__(
        self,
        clock: Callable[[], float],
        seconds: float = TOKEN_LOG_SECONDS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.label = BASE_LABEL  # of the weights that made the last tokens
        self._clock = clock
        self._seconds = seconds
        self._max_tokens = max_tokens
        self._logs: OrderedDict[str, _Kept] = OrderedDict()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in all logs."""
        return self._num_tokens

    def __len__(self) -> int:
        return len(self._logs)

    def keep(
        self,
        request: Request,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Keeps the log of a request with a receipt that has left its slots."""
        source = request.source
        assert source.receipt is not None, "its client asks for no log"
        self._forget(source.request_id)
        kept = _Kept(
            self._clock(),
            source.tenant,
            source.receipt,
            source.sampling.seed,
            request.output,
            finish_reason,
            stop_reason,
            request.cached_tokens,
            request.spans_up_to(len(request.output), self.label),
        )
        self._logs[source.request_id] = kept
        self._num_tokens += len(kept.tokens)
        self._expire()

    def find(self, tenant: str, request_id: str) -> TokenLog | None:
        """Returns the log of the tenant's request, or None if unknown or expired."""
        self._expire()
        kept = self._logs.get(request_id)
        return kept.log() if kept is not None and kept.tenant == tenant else None

    def _expire(self) -> None:
        oldest = self._clock() - self._seconds
        while self._logs:
            request_id, kept = next(iter(self._logs.items()))
            few = len(self._logs) <= MAX_LOGS and self._num_tokens <= self._max_tokens
            if few and kept.since >= oldest:
                return
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if (kept := self._logs.pop(request_id, None)) is not None:
            self._num_tokens -= len(kept.tokens)

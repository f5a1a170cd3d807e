"""The life of one response, from its creation to its end, for whoever asks about it."""

import asyncio
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from rayfin.actors.errors import Overloaded
from rayfin.deployments.api.responses.items import message_id
from rayfin.deployments.api.responses.replies import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputTextPart,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from rayfin.deployments.generation.logprobs import ChatTokenLogprob
from rayfin.deployments.http.errors import error_body

OVERHEAD = 2048  # bytes of a response beside its texts, and of each item
LOGPROB = 768  # bytes of a log probability
DONE: frozenset[Status] = frozenset({"completed", "incomplete", "cancelled", "failed"})


@dataclass(slots=True, frozen=True)
class ResponsePiece:
    """What one delta added to the text."""

    text: str
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)  # where asked for


@dataclass(slots=True, frozen=True)
class Change:
    """How a response stands, and its pieces from number ``since`` on."""

    since: int
    pieces: list[ResponsePiece]
    status: Status
    started: bool
    output_tokens: int
    cached_tokens: int
    error: ResponseError | None
    ended_at: int | None


@dataclass(slots=True, eq=False)
class ResponseState:
    """One response: what it was asked, its text piece by piece, and how it ended.

    All changes come through its methods, in the event loop of its ingress.
    """

    created: Response  # as it was when it was created
    tenant: str
    history: list[OutputMessage]  # of the responses before this one
    items: list[OutputMessage]  # of its own input
    input_tokens: int
    status: Status = "queued"
    pieces: list[ResponsePiece] = field(default_factory=list)
    started: bool = False  # the engine has given a first token
    output_id: str = field(default_factory=message_id)
    output_tokens: int = 0
    cached_tokens: int = 0
    error: ResponseError | None = None
    ended_at: int | None = None  # seconds since 1970
    task: "asyncio.Task[None] | None" = None  # that runs it in the background
    _news: asyncio.Event | None = None

    def __post_init__(self) -> None:
        self.status = self.created.status

    @property
    def id(self) -> str:
        return self.created.id

    @property
    def done(self) -> bool:
        return self.status in DONE

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def logprobs(self) -> list[ChatTokenLogprob]:
        return [own for piece in self.pieces for own in piece.logprobs]

    def append(
        self,
        text: str,
        output_tokens: int,
        cached_tokens: int,
        logprobs: Sequence[ChatTokenLogprob] = (),
    ) -> None:
        """More text, which may be none yet; the counts are totals."""
        self.started, self.status = True, "in_progress"
        self.output_tokens, self.cached_tokens = output_tokens, cached_tokens
        if text or logprobs:
            self.pieces.append(ResponsePiece(text, list(logprobs)))
        self._tell()

    def finish(self, status: Status, error: ResponseError | None = None) -> None:
        """The end; only the first one counts."""
        if not self.done:
            self.status, self.error, self.ended_at = status, error, int(time.time())
            self._tell()

    def fail(self, error: Exception) -> None:
        self.finish(
            "failed",
            ResponseError(
                code="rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error",
                message=error_body(error)["error"]["message"],
            ),
        )

    def snapshot(self) -> "ResponseState":
        """A copy that can travel; nobody runs it."""
        own = copy(self)
        own.pieces, own.task, own._news = list(self.pieces), None, None
        return own

    def change(self, since: int) -> Change:
        """What has happened since there were so many pieces."""
        return Change(
            since=since,
            pieces=self.pieces[since:],
            status=self.status,
            started=self.started,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            error=self.error,
            ended_at=self.ended_at,
        )

    def apply(self, change: Change) -> None:
        """Makes a copy of the response stand as the response does."""
        if not self.done:
            self.pieces[change.since :] = change.pieces
            self.status, self.started, self.error = change.status, change.started, change.error
            self.output_tokens, self.cached_tokens = change.output_tokens, change.cached_tokens
            self.ended_at = change.ended_at
            self._tell()

    def news(self) -> asyncio.Event:
        """Is set at the next change."""
        if self._news is None:
            self._news = asyncio.Event()
        return self._news

    def response(self) -> Response:
        """The response as it stands."""
        usage = ResponseUsage(
            input_tokens=self.input_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=self.cached_tokens),
            output_tokens=self.output_tokens,
            total_tokens=self.input_tokens + self.output_tokens,
        )
        return self.created.model_copy(
            update={
                "status": self.status,
                "output": [self.message()] if self.started else [],
                "usage": usage if self.done and self.started else None,
                "error": self.error,
                "incomplete_details": IncompleteDetails() if self.status == "incomplete" else None,
                "completed_at": self.ended_at if self.status == "completed" else None,
            }
        )

    def message(self) -> OutputMessage:
        """The output as it stands."""
        status = self.status if self.status in ("completed", "in_progress") else "incomplete"
        text = OutputTextPart(text=self.text, logprobs=self.logprobs)
        return OutputMessage(id=self.output_id, status=status, role="assistant", content=[text])

    def conversation(self) -> list[OutputMessage]:
        """All items up to and with the output, of which only the text goes on."""
        output = self.message().model_copy(update={"content": [OutputTextPart(text=self.text)]})
        return [*self.history, *self.items, *([output] if self.started else [])]

    def size(self) -> int:
        """Bytes of memory, more or less; what it shares with earlier responses is counted too."""
        items = [*self.history, *self.items]
        texts = [part.text for item in items for part in item.content]
        texts += [*(piece.text for piece in self.pieces), self.created.instructions or ""]
        told = sum(1 + len(own.top_logprobs) for own in self.logprobs)
        overhead = OVERHEAD * (1 + len(items)) + LOGPROB * told
        return overhead + sum(map(sys.getsizeof, texts))

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

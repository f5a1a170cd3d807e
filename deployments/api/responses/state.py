"""The state of one response, from its creation to its end."""

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
    """One response: its request, its text piece by piece, and how it ended.

    Only its methods change it, in the event loop of its ingress.
    """

    created: Response  # as it was when it was created
    tenant: str
    history: list[OutputMessage]  # of earlier responses
    items: list[OutputMessage]  # of its input
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
    _changed: asyncio.Event | None = None

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
        return [entry for piece in self.pieces for entry in piece.logprobs]

    def append(
        self,
        text: str,
        output_tokens: int,
        cached_tokens: int,
        logprobs: Sequence[ChatTokenLogprob] = (),
    ) -> None:
        """Adds text, which may be empty; the counts are totals."""
        self.started, self.status = True, "in_progress"
        self.output_tokens, self.cached_tokens = output_tokens, cached_tokens
        if text or logprobs:
            self.pieces.append(ResponsePiece(text, list(logprobs)))
        self._notify()

    def finish(self, status: Status, error: ResponseError | None = None) -> None:
        """Ends the response; later calls do nothing."""
        if not self.done:
            self.status, self.error, self.ended_at = status, error, int(time.time())
            self._notify()

    def fail(self, error: Exception) -> None:
        self.finish(
            "failed",
            ResponseError(
                code="rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error",
                message=error_body(error)["error"]["message"],
            ),
        )

    def snapshot(self) -> "ResponseState":
        """Returns a copy that can be sent; it has no task."""
        state = copy(self)
        state.pieces, state.task, state._changed = list(self.pieces), None, None
        return state

    def change(self, since: int) -> Change:
        """Returns the state now, with the pieces from number ``since`` on."""
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
        """Brings a copy up to date."""
        if not self.done:
            self.pieces[change.since :] = change.pieces
            self.status, self.started, self.error = change.status, change.started, change.error
            self.output_tokens, self.cached_tokens = change.output_tokens, change.cached_tokens
            self.ended_at = change.ended_at
            self._notify()

    def changed(self) -> asyncio.Event:
        """Returns an event that is set at the next change."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

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
        """All items up to and including the output, of which only the text is kept."""
        output = self.message().model_copy(update={"content": [OutputTextPart(text=self.text)]})
        return [*self.history, *self.items, *([output] if self.started else [])]

    def size(self) -> int:
        """Estimated bytes of memory, including what it shares with earlier responses."""
        items = [*self.history, *self.items]
        texts = [part.text for item in items for part in item.content]
        texts += [*(piece.text for piece in self.pieces), self.created.instructions or ""]
        logprobs = sum(1 + len(entry.top_logprobs) for entry in self.logprobs)
        overhead = OVERHEAD * (1 + len(items)) + LOGPROB * logprobs
        return overhead + sum(map(sys.getsizeof, texts))

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

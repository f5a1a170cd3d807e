"""The state of one response, from its creation to its end."""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field

from rayfin.actors.errors import Overloaded
from rayfin.deployments.api.responses.items import addresses_of, texts_of
from rayfin.deployments.api.responses.output import ResponseOutput
from rayfin.deployments.api.responses.replies import (
    IncompleteDetails,
    InputTokensDetails,
    Item,
    OutputMessage,
    OutputTextPart,
    OutputTokensDetails,
    RawMessage,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from rayfin.deployments.generation.choice import written_tokens
from rayfin.deployments.generation.logprobs import ChatTokenLogprob
from rayfin.deployments.guidance.tools import Tool
from rayfin.deployments.http.errors import error_body
from rayfin.deployments.text.parsing.events import Event

OVERHEAD = 2048  # bytes of a response beside its texts, and of each item
LOGPROB = 768  # bytes of a log probability
TOKEN = 40  # bytes of a token id in a list
SCHEMA_GROWTH = 8  # bytes of memory for each character of a schema's JSON
DONE: frozenset[Status] = frozenset({"completed", "incomplete", "cancelled", "failed"})


GROWS = (
    *("version", "status", "started", "error", "ended_at", "raw"),
    *("output_tokens", "reasoning_tokens", "cached_tokens"),
)
T = TypeVar("T")
Unsaved = Annotated[T, Field(exclude=True)]
Progress = dict[str, Any]
"""Fields that change while a response runs: its output, and those that GROWS names."""


@dataclass(slots=True, eq=False)
class ResponseState:
    """One response: its request, its output, and how it ended.

    Only its methods change it, in the event loop of its ingress.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    created: Response  # as it was when it was created
    tenant: str
    history: list[Item]  # of earlier responses
    items: list[Item]  # of its input
    input_tokens: int
    status: Status = "queued"
    output: ResponseOutput = field(default_factory=ResponseOutput)
    version: int = 0  # grows with each change
    started: bool = False  # the engine has given a first token
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of these
    cached_tokens: int = 0
    page_size: int = 0  # as Choice.page_size
    root: str = ""  # the id of the first response before this one
    raw: list[RawMessage] = field(default_factory=list)  # prompt and output, if asked for
    error: ResponseError | None = None
    ended_at: int | None = None  # seconds since 1970
    task: Unsaved[asyncio.Task[None] | None] = None  # that runs it in the background
    _changed: Unsaved[asyncio.Event | None] = None

    def __post_init__(self) -> None:
        if not self.version:
            self.status = self.created.status

    @property
    def id(self) -> str:
        return self.created.id

    @property
    def created_at(self) -> int:
        """Seconds since 1970."""
        return self.created.created_at

    @property
    def done(self) -> bool:
        return self.status in DONE

    def append(
        self,
        events: Sequence[Event],
        output_tokens: int,
        cached_tokens: int,
        *,
        reasoning_tokens: int = 0,
        logprobs: Sequence[ChatTokenLogprob] = (),
        call_ids: Sequence[str] = (),
        tools: Mapping[str, Tool] = {},
    ) -> None:
        """Adds the events of a delta, as :meth:`ResponseOutput.append`; the counts are totals."""
        self.started, self.status = True, "in_progress"
        self.output_tokens, self.cached_tokens = output_tokens, cached_tokens
        self.reasoning_tokens = reasoning_tokens
        self.output.append(events, logprobs, call_ids, tools)
        self.version += 1
        self._notify()

    def finish(self, status: Status, error: ResponseError | None = None) -> None:
        """Ends the response; later calls do nothing."""
        if not self.done:
            if self.started and status != "failed":
                self.output.complete()
            self.status, self.error, self.ended_at = status, error, int(time.time())
            self.version += 1
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
        state.output = self.output.copy()
        state.task, state._changed = None, None
        return state

    def progress(self) -> Progress:
        """Returns what may have changed, as it is now."""
        return {"output": self.output.copy(), **{name: getattr(self, name) for name in GROWS}}

    def apply(self, progress: Progress) -> None:
        """Brings a copy up to date."""
        if not self.done:
            for name, value in progress.items():
                setattr(self, name, value)
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
            input_tokens_details=InputTokensDetails(
                cached_tokens=self.cached_tokens,
                cache_write_tokens=written_tokens(
                    self.input_tokens, self.cached_tokens, self.page_size
                ),
            ),
            output_tokens=self.output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self.reasoning_tokens),
            total_tokens=self.input_tokens + self.output_tokens,
        )
        return self.created.model_copy(
            update={
                "status": self.status,
                "output": [item.reply(item.status(self.status)) for item in self.output.items],
                "input_messages": self.raw[:1] or None,
                "output_messages": self.raw[1:] or None,
                "usage": usage if self.done and self.started else None,
                "error": self.error,
                "incomplete_details": IncompleteDetails() if self.status == "incomplete" else None,
                "completed_at": self.ended_at if self.status == "completed" else None,
            }
        )

    def conversation(self) -> list[Item]:
        """Returns all items up to and including the output, without log probabilities.

        A call that was cut is left out: no later turn could parse it.
        """
        output: list[Item] = []
        for item in self.output.items:
            status = item.status(self.status)
            if status == "completed" or not item.is_call:
                output.append(item.reply(status).model_copy(deep=True))
        for said in output:
            if isinstance(said, OutputMessage):
                said.content = [OutputTextPart(text=text) for text in texts_of(said)]
        return [*self.history, *self.items, *output]

    def size(self) -> int:
        """Estimated bytes of memory, including what it shares with earlier responses."""
        items = [*self.history, *self.items]
        created = self.created
        named = (created.prompt_cache_key, created.safety_identifier, created.user)
        texts = [created.instructions or "", *filter(None, named)]
        texts += itertools.chain.from_iterable(map(texts_of, items))
        texts += itertools.chain.from_iterable(map(addresses_of, items))
        pieces = [piece for item in self.output.items for piece in item.pieces]
        texts += [text for text, _ in pieces]
        logprobs = sum(1 + len(entry.top_logprobs) for _, entries in pieces for entry in entries)
        texts += [message.message for message in self.raw]
        tokens = TOKEN * sum(len(message.tokens) for message in self.raw)
        overhead = (
            tokens + OVERHEAD * (len(items) + max(1, len(self.output.items))) + LOGPROB * logprobs
        )
        return overhead + self._schema_bytes() + sum(map(sys.getsizeof, texts))

    def _schema_bytes(self) -> int:
        schemas = [*self.created.tools, self.created.text["format"].get("schema")]
        return sum(SCHEMA_GROWTH * len(json.dumps(schema)) for schema in schemas if schema)

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

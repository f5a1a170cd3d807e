"""Streams that continue after a disconnect: event ids, and ``Last-Event-ID``.

An ingress keeps no state for it: the engine keeps the tokens of a request for a minute after its
end (``TokenLogs``), the client sends the last event id and repeats the body. If the engine has died
too, the tokens of greedy and of seeded requests are computed again.
"""

import asyncio
import hashlib
import re
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from starlette.requests import Request

from rayfin.actors.errors import InvalidRequest, NotFound
from rayfin.actors.messages import Receipt, TokenDelta, TokenLog
from rayfin.actors.weights.spans import SpanLog, first
from rayfin.actors.weights.version import BASE_LABEL
from rayfin.deployments.client.engine_client import EngineClient
from rayfin.deployments.generation.build_requests import KEY_BITS
from rayfin.deployments.generation.choice import Choice
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.sse import event
from rayfin.deployments.text.output import TextDelta

LAST_EVENT_ID = "last-event-id"
EVENT_STREAM = "text/event-stream"
END = "end"
MAX_MARKS = 1024  # streams of more choices have no event ids
MARK = r"(?:[0-9]{1,9}e?)?"
EVENT_ID = re.compile(rf"([a-z]{{1,16}}-[0-9a-f]{{32}}):({MARK}(?:,{MARK}){{0,1023}}|{END})")


class Mark(NamedTuple):
    """How much of a choice was sent: its tokens, and whether its end. Marks are ordered."""

    tokens: int = -1  # -1: nothing, not even an opening event
    ended: bool = False

    def __str__(self) -> str:
        return "" if self.tokens < 0 else f"{self.tokens}{'e' if self.ended else ''}"

    @classmethod
    def read(cls, text: str) -> "Mark":
        return cls(int(text.removesuffix("e")), text.endswith("e")) if text else cls()


class Cursor:
    """How much of a streamed answer its client has, choice by choice.

    An event's id is ``{request_id}:{marks}``, a mark for each choice, or ``{request_id}:end`` when
    all but [DONE] is sent. The server makes the request id, which cannot be guessed.

    Events have ids for clients that ask for an event stream: others read nothing but data, such as
    ``vllm bench serve``.
    """

    def __init__(self, request_id: str, asked: str = "") -> None:
        self.request_id = request_id
        self._named = bool(asked)  # events have ids
        self._asked = asked
        self._had: list[Mark] = []  # what the client had at the start
        self._has: list[Mark] = []  # what it has now
        self._taken: list[Mark] = []  # what the engine has sent
        self._streamed: list[int] = []  # tokens of each choice that have come

    @classmethod
    def of(cls, request: Request, prefix: str, fresh: "Cursor") -> "Cursor":
        """Returns the cursor of the request's Last-Event-ID, or ``fresh`` if it has none.

        Raises:
            InvalidRequest: the header is not an event id of this API.
        """
        written = request.headers.get(LAST_EVENT_ID)
        if written is None:
            fresh._named = EVENT_STREAM in request.headers.get("accept", "").lower()
            return fresh
        match = EVENT_ID.fullmatch(written)
        if match is None or not written.startswith(f"{prefix}-"):
            raise InvalidRequest("Last-Event-ID is no id of an event of this API.", LAST_EVENT_ID)
        return cls(match[1], match[2])

    async def open(
        self,
        request: Request,
        client: EngineClient,
        choices: Sequence[Choice],
        receipt: Receipt,
        *,
        seeded: bool = False,
    ) -> Receipt:
        """Keeps the tokens of ``choices`` under ``receipt`` if their events have ids; resumes after
        the last event id.

        Args:
            seeded: the request's body has a seed.

        Returns:
            The receipt of the answer: the earlier one if that is resumed.

        Raises:
            NotFound: the earlier answer is unknown or expired.
            InvalidRequest: the earlier request had another body.
        """
        self._had = [Mark()] * len(choices)
        self._streamed = [0] * len(choices)
        if self._asked:
            asked = [choice.request.request_id for choice in choices]
            logs = await client.recall(Caller.of(request).tenant, asked)
            greedy = not any(choice.request.sampling.temperature for choice in choices)
            if (seeded or greedy) and self._asked != END:
                logs = await self._completed(client, choices, logs, receipt)
            known = [log for log in logs if log is not None]
            if not known or len(known) < len(logs):
                raise _unknown()
            if known[0].receipt.digest != receipt.digest:
                raise InvalidRequest(
                    "The stream that Last-Event-ID names answers another request: repeat that one.",
                    LAST_EVENT_ID,
                )
            receipt = known[0].receipt
            self._had = self._read_marks(known)
            for choice, log, mark in zip(choices, known, self._had, strict=True):
                _resume(choice, log, mark)
        self._has = list(self._had)
        self._taken = [Mark(max(0, mark.tokens)) for mark in self._had]
        if self._named:  # the rest of others cannot be requested
            for choice in choices:
                choice.request.receipt = receipt
        return receipt

    def begun(self) -> set[int]:
        """Returns the choices of which the client has had an event."""
        return {index for index, mark in enumerate(self._had) if mark.tokens >= 0}

    def is_new(self, choice: Choice, delta: TextDelta) -> bool:
        """Counts ``delta``; returns False if the client already has it."""
        index = choice.index
        self._streamed[index] += len(delta.token_ids)
        mark = Mark(self._streamed[index], delta.finish_reason is not None)
        return mark > self._had[index]

    def sent(self, choice: Choice) -> int:
        """Returns the number of the choice's tokens that ``advance`` has counted."""
        return self._taken[choice.index].tokens

    def advance(self, choice: Choice, delta: TextDelta) -> None:
        """Adds ``delta`` to what the next event of ``choice`` covers."""
        tokens = self._taken[choice.index].tokens + len(delta.token_ids)
        self._taken[choice.index] = Mark(tokens, delta.finish_reason is not None)

    def opening(self, data: str, choice: Choice) -> str:
        """Returns the event that opens a choice, before its first delta."""
        return self._event(data, choice, self._taken[choice.index])

    def event(self, data: str, choice: Choice) -> str:
        """Returns an event of a choice; its id covers all that was sent."""
        return self._event(data, choice, self._taken[choice.index])

    def usage(self, data: str) -> str | None:
        """Returns the event after all choices, or None if the client has it."""
        if self._asked == END:
            return None
        return event(data, f"{self.request_id}:{END}" if self._named else None)

    def _event(self, data: str, choice: Choice, mark: Mark) -> str:
        if not self._named or len(self._has) > MAX_MARKS:
            return event(data)
        self._has[choice.index] = mark
        marks = ",".join(map(str, self._has))
        return event(data, f"{self.request_id}:{marks}")

    def _read_marks(self, logs: Sequence[TokenLog]) -> list[Mark]:
        if self._asked == END:
            return [Mark(len(log.tokens), True) for log in logs]
        marks = self._asked_marks(len(logs))
        if any(mark.tokens > len(log.tokens) for mark, log in zip(marks, logs, strict=True)):
            raise _unknown()  # the engine that had all of it has died
        return marks

    def _asked_marks(self, count: int) -> list[Mark]:
        marks = [Mark.read(text) for text in self._asked.split(",")]
        if len(marks) != count:
            raise InvalidRequest("Last-Event-ID has another number of choices.", LAST_EVENT_ID)
        return marks

    async def _completed(
        self,
        client: EngineClient,
        choices: Sequence[Choice],
        logs: Sequence[TokenLog | None],
        receipt: Receipt,
    ) -> list[TokenLog | None]:
        """Returns ``logs``; those with less than the client has are computed again."""

        async def whole(choice: Choice, mark: Mark, log: TokenLog | None) -> TokenLog:
            if log is not None and len(log.tokens) >= mark.tokens:
                return log
            return await _recompute(client, choice, mark, log.receipt if log else receipt)

        marks = self._asked_marks(len(choices))
        tasks = [asyncio.create_task(work) for work in map(whole, choices, marks, logs)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


async def digest_of(request: Request) -> bytes:
    """Hashes the path and the body, which must have been read."""
    return hashlib.sha256(request.url.path.encode() + b"\n" + await request.body()).digest()


async def _recompute(
    client: EngineClient, choice: Choice, mark: Mark, receipt: Receipt
) -> TokenLog:
    """Computes what the client has of a choice again; the same seed gives the same tokens."""
    request = replace(
        choice.request,
        key=secrets.randbits(KEY_BITS),  # the choice's key is for what follows
        parent_key=None,
        sampling=replace(choice.request.sampling, logprobs=None, prompt_logprobs=None),
    )
    tokens: list[int] = []
    versions = SpanLog()
    last = TokenDelta(request.request_id, [])
    if mark.tokens > 0:
        async with aclosing(client.stream(request)) as deltas:
            async for last in deltas:
                tokens += last.tokens
                versions.add(last.weights, len(last.tokens), kept=last.kept)
                if len(tokens) >= mark.tokens:
                    break
    if any(span.label != BASE_LABEL for span in versions.spans):
        raise _unknown()  # other weights may have made what the client has
    return TokenLog(
        *(receipt, request.sampling.seed, tokens, last.finish_reason, last.stop_reason),
        spans=versions.spans,
    )


def _resume(choice: Choice, log: TokenLog, mark: Mark) -> None:
    """Starts the choice with what the client has, and what the engine has sent since."""
    request, name = choice.request, choice.request.request_id
    sent = max(mark.tokens, 0)
    # Logs have no log probabilities: with them, tokens that the client lacks are computed again.
    kept = sent if request.sampling.logprobs is not None else len(log.tokens)
    request.sampling = replace(
        request.sampling,
        seed=log.seed,
        prompt_logprobs=None if sent else request.sampling.prompt_logprobs,
    )
    request.output = log.tokens[:kept]
    request.spans = first(log.spans, kept)
    choice.output.versions = SpanLog(request.spans)
    had, since = TokenDelta(name, log.tokens[:sent]), TokenDelta(name, log.tokens[sent:kept])
    if log.finish_reason is not None and kept == len(log.tokens):
        last = had if mark.ended else since
        last.finish_reason, last.stop_reason = log.finish_reason, log.stop_reason
    if mark.tokens >= 0:
        choice.earlier.append(had)
    if since.tokens or since.finish_reason is not None:
        choice.earlier.append(since)
    for delta in choice.earlier:
        delta.cached_tokens = log.cached_tokens


def _unknown() -> NotFound:
    return NotFound(
        "The stream that Last-Event-ID names is not known, or no longer: it is kept for a minute.",
        LAST_EVENT_ID,
        "stream_not_found",
    )

"""Anthropic's message batches, which are batches of ``/v1/messages``.

https://platform.claude.com/docs/en/api/creating-message-batches.
"""

import asyncio
import io
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.responses import StreamingResponse

from rayfin.actors.errors import InvalidRequest, NotFound
from rayfin.deployments.batches.folder import BatchFolder
from rayfin.deployments.batches.lines import MESSAGES
from rayfin.deployments.batches.objects import StoredBatch
from rayfin.deployments.batches.routes import store_of
from rayfin.deployments.http.json_body import ignored_header, read_body
from rayfin.deployments.http.query import number_of, place_behind, tenant_of

BATCHES = f"{MESSAGES}/batches"
PREFIX, OURS = "msgbatch_", "batch_"
CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_PAGE, PAGE = 1000, 20


class MessageBatchLine(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: str
    params: dict[str, Any]


class MessageBatchRequest(BaseModel):
    """The body of ``POST /v1/messages/batches``."""

    model_config = ConfigDict(strict=True, extra="allow")

    requests: list[MessageBatchLine]

    def lines(self, limit: int) -> bytes:
        """Returns the input of the batch.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong.
        """
        if not 1 <= len(self.requests) <= limit:
            raise InvalidRequest(f"requests must have 1 to {limit} elements.", "requests")
        seen: set[str] = set()
        lines = []
        for i, line in enumerate(self.requests):
            if not CUSTOM_ID.fullmatch(line.custom_id) or line.custom_id in seen:
                raise InvalidRequest(
                    "A custom_id has 1 to 64 letters, digits, _ or -, and no other request's.",
                    f"requests[{i}].custom_id",
                )
            if line.params.get("stream"):
                raise InvalidRequest("A batch has whole answers.", f"requests[{i}].params.stream")
            seen.add(line.custom_id)
            lines.append({"custom_id": line.custom_id, "url": MESSAGES, "body": line.params})
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class MessageCounts(BaseModel):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(BaseModel):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class MessageBatchList(BaseModel):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


def add_message_batch_routes(
    app: FastAPI,
    folder: BatchFolder | None,
    resolve: Callable[[Request, str | None], Awaitable[object]],
) -> None:
    """Adds the routes; without a folder each answers that batches are off.

    Args:
        resolve: refuses the name of a model that is not served.
    """

    @app.post(BATCHES)
    async def create(request: Request, response: Response) -> MessageBatch:
        store, tenant = store_of(folder), tenant_of(request)
        body = await read_body(request, MessageBatchRequest)
        data = body.lines(store.limits.max_lines)
        models = (line.params.get("model") for line in body.requests)
        for model in {model if isinstance(model, str) else None for model in models}:
            await resolve(request, model)
        response.headers.update(ignored_header(list(body.model_extra or {})))
        total = len(body.requests)
        return shown(request, await asyncio.to_thread(_added, store, tenant, data, total))

    @app.get(BATCHES)
    async def list_batches(request: Request) -> MessageBatchList:
        every = await asyncio.to_thread(store_of(folder).batches, tenant_of(request))
        return _page(request, [batch for batch in every if batch.endpoint == MESSAGES])

    async def find(request: Request, batch_id: str) -> StoredBatch:
        ours = OURS + batch_id.removeprefix(PREFIX)
        batch = await asyncio.to_thread(store_of(folder).batch, tenant_of(request), ours)
        if batch.endpoint != MESSAGES or not batch_id.startswith(PREFIX):
            raise NotFound(f"No message batch found with id '{batch_id[:64]}'.", "batch_id")
        return batch

    @app.get(BATCHES + "/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> MessageBatch:
        return shown(request, await find(request, batch_id))

    @app.post(BATCHES + "/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> MessageBatch:
        batch = await find(request, batch_id)
        batch = await asyncio.to_thread(store_of(folder).cancel, tenant_of(request), batch.id)
        return shown(request, batch)

    @app.get(BATCHES + "/{batch_id}/results")
    async def results(request: Request, batch_id: str) -> Response:
        batch = await find(request, batch_id)
        if not batch.ended:
            raise NotFound("The message batch has not ended yet: it has no results.", "batch_id")
        lines = _results(store_of(folder), batch)
        return StreamingResponse(lines, media_type="application/x-jsonl")


def _added(store: BatchFolder, tenant: str, data: bytes, total: int) -> StoredBatch:
    """Stores a batch and its input, or neither: its client knows of no file."""
    file = store.add_file(tenant, io.BytesIO(data), filename="message_batch.jsonl", purpose="batch")
    try:
        return store.add_batch(
            tenant, file.id, endpoint=MESSAGES, window="24h", metadata=None, total=total
        )
    except BaseException:
        store.delete_file(tenant, file.id)
        raise


def shown(request: Request, batch: StoredBatch) -> MessageBatch:
    """Returns a batch as Anthropic's clients see it."""
    left = batch.total - batch.completed - batch.failed
    batch_id, times = PREFIX + batch.id.removeprefix(OURS), batch.times
    state: Any = "canceling" if batch.status == "cancelling" else "in_progress"
    ended = max(times.values(), default=batch.created_at) if batch.ended else None
    return MessageBatch(
        id=batch_id,
        processing_status="ended" if batch.ended else state,
        request_counts=MessageCounts(
            processing=0 if batch.ended else left,
            succeeded=batch.completed,
            errored=batch.failed - batch.expired + (left if batch.status == "failed" else 0),
            canceled=left if batch.status == "cancelled" else 0,
            expired=batch.expired,
        ),
        created_at=_written(batch.created_at) or "",
        expires_at=_written(batch.expires_at) or "",
        ended_at=_written(ended),
        cancel_initiated_at=_written(times.get("cancelling")),
        results_url=f"{request.base_url}{BATCHES[1:]}/{batch_id}/results" if batch.ended else None,
    )


def _results(store: BatchFolder, batch: StoredBatch) -> Iterator[str]:
    """Yields a line for each request: of its answer, or why it has none."""
    answered: set[str] = set()
    for file_id in (batch.output_id, batch.error_id):
        with suppress(NotFound), store.content(batch.tenant, file_id).open("rb") as file:
            for data in file:
                answer = json.loads(data)
                answered.add(answer["custom_id"])
                yield _line(answer["custom_id"], _result(answer))
    reason: Any = {"type": "canceled"}
    if batch.status == "failed":
        said = batch.errors[0]["message"] if batch.errors else "The batch failed."
        reason = _errored({"type": "invalid_request_error", "message": said})
    with suppress(NotFound), store.content(batch.tenant, batch.input_file_id).open("rb") as file:
        for data in file:
            if (custom_id := json.loads(data)["custom_id"]) not in answered:
                yield _line(custom_id, reason)


def _result(answer: dict[str, Any]) -> dict[str, Any]:
    response, error = answer["response"], answer["error"]
    if error is not None:
        if error["code"] == "batch_expired":
            return {"type": "expired"}
        return _errored({"type": "invalid_request_error", "message": error["message"]})
    if response["status_code"] < 400:
        return {"type": "succeeded", "message": response["body"]}
    body = response["body"]
    said = body["error"] if isinstance(body, dict) and "error" in body else {"message": str(body)}
    return _errored({"type": "api_error", **said})


def _errored(error: dict[str, Any]) -> dict[str, Any]:
    return {"type": "errored", "error": {"type": "error", "error": error}}


def _line(custom_id: str, result: dict[str, Any]) -> str:
    return json.dumps({"custom_id": custom_id, "result": result}, ensure_ascii=False) + "\n"


def _page(request: Request, batches: list[StoredBatch]) -> MessageBatchList:
    """Returns a page of a list: ``limit`` batches behind ``after_id``, or before ``before_id``."""
    limit = number_of(request, "limit", PAGE, 1, MAX_PAGE)
    ids = [PREFIX + batch.id.removeprefix(OURS) for batch in batches]
    first, last = place_behind(request, ids, "after_id"), len(batches)
    before = place_behind(request, ids, "before_id")
    if before and not first:
        last = before - 1
        first = max(0, last - limit)
    page = batches[first : min(last, first + limit)]
    return MessageBatchList(
        data=[shown(request, batch) for batch in page],
        has_more=first > 0 if "before_id" in request.query_params else first + limit < last,
        first_id=ids[first] if page else None,
        last_id=ids[first + len(page) - 1] if page else None,
    )


def _written(seconds: int | None) -> str | None:
    """Returns a moment in RFC 3339."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()

"""OpenAI's Files and Batches: https://platform.openai.com/docs/api-reference/batch."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from rayfin.actors.errors import InvalidRequest, NotFound
from rayfin.deployments.batches.folder import BatchFolder
from rayfin.deployments.batches.lines import ENDPOINTS
from rayfin.deployments.batches.objects import StoredBatch, StoredFile
from rayfin.deployments.http.body_limits import UPLOAD_PATH as FILES
from rayfin.deployments.http.json_body import read_body
from rayfin.deployments.http.query import number_of, place_behind, tenant_of
from rayfin.deployments.text.checks import check_metadata

T = TypeVar("T", StoredBatch, StoredFile)

FORM_BYTES = 64 * 1024
"""Of an upload beside its file: boundaries, headers and fields."""

MAX_FIELDS = 8
MAX_FIELD_BYTES = 4096
MAX_FILENAME = 255  # characters
MIN_MAX_AGE = (3600, 2592000)  # OpenAI's bounds of expires_after
DIGITS = re.compile(r"[0-9]{1,9}")
MAX_FILES_PAGE, MAX_BATCHES_PAGE = 10_000, 100


class OutputExpiresAfter(BaseModel):
    """How long the files of a batch's answers are kept, from when they are there."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(BaseModel):
    """The body of ``POST /v1/batches``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiresAfter | None = None

    def check(self) -> None:
        """Raises:
        InvalidRequest: an endpoint that batches do not have, too much metadata, or an age that
            files cannot have.
        """
        if self.endpoint not in ENDPOINTS:
            known = ", ".join(ENDPOINTS)
            raise InvalidRequest(
                f"endpoint must be one of {known}, got {self.endpoint[:64]!r}.", "endpoint"
            )
        if self.output_expires_after is not None:
            check_age(self.output_expires_after.seconds, "output_expires_after.seconds")
        check_metadata(self.metadata or {})


class DeletedFile(BaseModel):
    """The answer to ``DELETE /v1/files/{id}``."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def add_batch_routes(app: FastAPI, folder: BatchFolder | None) -> None:
    """Adds the routes; without a folder each answers that batches are off."""
    add_file_routes(app, folder)

    @app.post("/v1/batches")
    async def create_batch(request: Request) -> dict[str, Any]:
        store = store_of(folder)
        body = await read_body(request, BatchRequest)
        body.check()
        kept = body.output_expires_after
        batch = await asyncio.to_thread(
            lambda: store.add_batch(
                *(tenant_of(request), body.input_file_id),
                endpoint=body.endpoint,
                window=body.completion_window,
                metadata=body.metadata,
                output_seconds=None if kept is None else kept.seconds,
            )
        )
        return batch.shown()

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> dict[str, Any]:
        batches = await asyncio.to_thread(store_of(folder).batches, tenant_of(request))
        return _page(request, batches, MAX_BATCHES_PAGE, 20)

    @app.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> dict[str, Any]:
        batch = await asyncio.to_thread(store_of(folder).batch, tenant_of(request), batch_id)
        return batch.shown()

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
        batch = await asyncio.to_thread(store_of(folder).cancel, tenant_of(request), batch_id)
        return batch.shown()


def add_file_routes(app: FastAPI, folder: BatchFolder | None) -> None:
    @app.post(FILES)
    async def upload_file(request: Request) -> dict[str, Any]:
        store = store_of(folder)
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidRequest("The body must be multipart/form-data.", None, "invalid_type")
        form_of = request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
        async with form_of as form:
            file, seconds = _upload(form, store.limits.max_file_bytes)
            stored = await asyncio.to_thread(
                lambda: store.add_file(
                    *(tenant_of(request), file.file),
                    filename=(file.filename or "upload")[:MAX_FILENAME],
                    purpose="batch",
                    expires_after=seconds,
                )
            )
        return stored.shown()

    @app.get(FILES)
    async def list_files(request: Request) -> dict[str, Any]:
        files = await asyncio.to_thread(store_of(folder).files, tenant_of(request))
        purpose = request.query_params.get("purpose")
        if purpose is not None:
            files = [file for file in files if file.purpose == purpose]
        if request.query_params.get("order", "desc") == "asc":
            files.reverse()
        return _page(request, files, MAX_FILES_PAGE, MAX_FILES_PAGE)

    @app.get(FILES + "/{file_id}")
    async def retrieve_file(request: Request, file_id: str) -> dict[str, Any]:
        file = await asyncio.to_thread(store_of(folder).file, tenant_of(request), file_id)
        return file.shown()

    @app.get(FILES + "/{file_id}/content")
    async def file_content(request: Request, file_id: str) -> Response:
        path = await asyncio.to_thread(store_of(folder).content, tenant_of(request), file_id)
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete(FILES + "/{file_id}")
    async def delete_file(request: Request, file_id: str) -> DeletedFile:
        await asyncio.to_thread(store_of(folder).delete_file, tenant_of(request), file_id)
        return DeletedFile(id=file_id)


def store_of(folder: BatchFolder | None) -> BatchFolder:
    if folder is None:
        raise NotFound("Batches are off: the server needs --batch-dir.", None)
    return folder


def _upload(form: FormData, max_bytes: int) -> tuple[UploadFile, int | None]:
    """The file of a form and its time to live in seconds.

    Raises:
        InvalidRequest: a field is missing, unknown or has a bad value.
        HTTPException: 413 the file is too large.
    """
    known = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
    if unknown := [name for name in form if name not in known]:
        raise InvalidRequest(
            f"Unknown parameter: {unknown[0][:64]!r}.", unknown[0][:64], "unknown_parameter"
        )
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("file must be a file.", "file", "missing_required_parameter")
    if purpose != "batch":
        raise InvalidRequest(f"purpose must be batch, got {str(purpose)[:64]!r}.", "purpose")
    if (file.size or 0) > max_bytes:
        raise HTTPException(413, f"The file is larger than {max_bytes} bytes.")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return file, None
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor must be created_at.", "expires_after.anchor")
    if not isinstance(seconds, str) or not DIGITS.fullmatch(seconds):
        raise InvalidRequest(
            "expires_after.seconds must be a whole number.", "expires_after.seconds"
        )
    check_age(int(seconds), "expires_after.seconds")
    return file, int(seconds)


def check_age(seconds: int, param: str) -> None:
    """Raises:
    InvalidRequest: files are not kept for so long, or so short.
    """
    low, high = MIN_MAX_AGE
    if not low <= seconds <= high:
        raise InvalidRequest(f"{param} must be in [{low}, {high}], got {seconds}.", param)


def _page(request: Request, objects: Sequence[T], max_page: int, default: int) -> dict[str, Any]:
    """A page of a list: ``limit`` objects behind ``after``."""
    limit = number_of(request, "limit", default, 1, max_page)
    start = place_behind(request, [each.id for each in objects])
    page = [each.shown() for each in objects[start : start + limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(objects),
    }

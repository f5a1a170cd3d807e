"""OpenAI's objects of files and batches, for the description of the API; objects.py makes them."""

from typing import Any, Literal

from pydantic import BaseModel


class FileObject(BaseModel):
    id: str
    object: Literal["file"]
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970
    expires_at: int | None
    status: Literal["processed"]
    status_details: None


class Page(BaseModel):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page):
    data: list[FileObject]


class BatchError(BaseModel):
    code: str | None = None
    message: str
    line: int | None = None  # of the input file, from 1
    param: str | None = None


class BatchErrors(BaseModel):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class BatchUsage(BaseModel):
    """Of the answers so far."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


class BatchList(Page):
    data: list[BatchObject]


def _query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    parameter = {"name": name, "in": "query", "required": False}
    return {**parameter, "schema": schema, "description": text}


AFTER = _query("after", {"type": "string"}, "The object that the page begins behind.")
NEAR = [
    _query("after_id", {"type": "string"}, "The batch that the page begins behind."),
    _query("before_id", {"type": "string"}, "The batch that the page ends before."),
]
ORDER = _query("order", {"enum": ["asc", "desc"]}, "By the time of their making; default: desc.")
PURPOSE = _query("purpose", {"type": "string"}, "Files of this purpose only.")


def limit(maximum: int) -> dict[str, Any]:
    """The query parameter of a page's length."""
    schema = {"type": "integer", "minimum": 1, "maximum": maximum}
    return _query("limit", schema, "Objects on a page.")


UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}
"""The form of ``POST /v1/files``."""

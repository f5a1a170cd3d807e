"""OpenAI's objects of files and batches, as they are stored and as clients see them."""

import re
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.batches.usage import shown_usage

STATUSES = (
    *("validating", "in_progress", "finalizing", "completed", "failed"),
    *("expired", "cancelling", "cancelled"),
)
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
MAX_WINDOW_HOURS = 168
MAX_ERRORS = 100
"""Bad lines that a failed batch names."""


@dataclass(slots=True)
class StoredFile:
    """A file's record; its content is beside it."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970
    expires_at: int | None = None

    def shown(self) -> dict[str, Any]:
        value = asdict(self)
        del value["tenant"]
        return {**value, "object": "file", "status": "processed", "status_details": None}


@dataclass(slots=True)
class StoredBatch:
    """A batch's record. The worker that holds the batch writes it; nothing else does."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str  # of the files that there will be
    error_id: str
    metadata: dict[str, str] | None = None
    status: str = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0  # of these, whose window has ended
    errors: list[dict[str, Any]] = field(default_factory=list)  # of a batch that failed
    has_output: bool = False
    has_errors: bool = False
    output_seconds: int | None = None  # that the answers are kept; None: as the folder has it
    usage: dict[str, int] = field(default_factory=dict)  # of all answers, see usage.py
    times: dict[str, int] = field(default_factory=dict)  # "in_progress" -> seconds since 1970

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def enter(self, status: str) -> None:
        """The batch has a new status from now on."""
        assert status in STATUSES, status
        self.status = status
        self.times.setdefault(status, int(time.time()))

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        times = {f"{name}_at": self.times.get(name) for name in STATUSES if name != "validating"}
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **times,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": shown_usage(self.usage) if self.usage else None,
            "metadata": self.metadata,
        }


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"


def window_seconds(window: str) -> int:
    """Seconds of a completion window.

    Raises:
        InvalidRequest: it is not of the form 24h, or longer than a week.
    """
    match = WINDOW.fullmatch(window)
    if match is None or int(match[1]) > MAX_WINDOW_HOURS:
        raise InvalidRequest(
            f"completion_window must be 1h to {MAX_WINDOW_HOURS}h, got {window[:32]!r}.",
            "completion_window",
        )
    return int(match[1]) * 3600

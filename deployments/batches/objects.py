"""OpenAI's objects of files and batches, as they are stored and as clients see them."""

import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rayfin.actors.errors import InvalidRequest

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


# Names in the answers: OpenAI's chats, completions and embeddings; responses; Anthropic's messages,
# whose input_tokens leave out what was cached.
INPUT = (
    *("prompt_tokens", "input_tokens"),
    *("cache_read_input_tokens", "cache_creation_input_tokens"),
)
OUTPUT = ("completion_tokens", "output_tokens")
INPUT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
OUTPUT_DETAILS = ("completion_tokens_details", "output_tokens_details")


def usage_of(body: Any) -> Counter[str]:
    """Tokens of an answer: input, of these cached, output, of these reasoning; none if unknown."""
    usage = _part(body, "usage") or _part(_part(body, "meta"), "billed_units")  # Cohere's
    cached = [_part(usage, name) for name in INPUT_DETAILS]
    thought = [_part(usage, name) for name in OUTPUT_DETAILS]
    counts = {
        "input": sum(_number(usage, name) for name in INPUT),
        "cached": sum(_number(details, "cached_tokens") for details in cached)
        + _number(usage, "cache_read_input_tokens"),
        "output": sum(_number(usage, name) for name in OUTPUT),
        "reasoning": sum(_number(details, "reasoning_tokens") for details in thought),
    }
    return Counter({name: value for name, value in counts.items() if value})


def shown_usage(counts: Mapping[str, int]) -> dict[str, Any]:
    """OpenAI's object of ``usage_of``'s counts."""
    taken, given = counts.get("input", 0), counts.get("output", 0)
    return {
        "input_tokens": taken,
        "input_tokens_details": {"cached_tokens": counts.get("cached", 0)},
        "output_tokens": given,
        "output_tokens_details": {"reasoning_tokens": counts.get("reasoning", 0)},
        "total_tokens": taken + given,
    }


def _part(value: Any, name: str) -> dict[str, Any]:
    part = value.get(name) if isinstance(value, dict) else None
    return part if isinstance(part, dict) else {}


def _number(value: dict[str, Any], name: str) -> int:
    number = value.get(name)
    return number if isinstance(number, int) else 0

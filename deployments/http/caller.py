"""The sender of a request, its session, and how long it waits for the answer."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import SessionRef

TIMEOUT = "x-request-timeout-ms"
SESSION = "x-session-id"
MAX_SESSION = 256  # characters
MILLISECONDS = re.compile(r"[0-9]{1,9}")

SESSION_HEADERS = (  # (session, its parent), the first that is there
    (SESSION, "x-parent-session-id"),
    ("x-claude-code-session-id", ""),
    ("thread-id", "x-codex-parent-thread-id"),
    ("session-id", "x-codex-parent-thread-id"),
    ("session_id", "x-codex-parent-thread-id"),
    ("x-session-affinity", "x-dynamo-parent-session-id"),
    ("x-opencode-session", "x-dynamo-parent-session-id"),
    ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
)
"""Names that clients give to their sessions: ours, Claude Code's, Codex's, OpenCode's, Dynamo's."""

CLAUDE_AGENTS = ("x-claude-code-agent-id", "x-claude-code-parent-agent-id")
"""A subagent of a Claude Code session, and the one that has started it, if not the session."""

SESSION_MEMBERS = ("session_id", "prompt_cache_key", "conversation")
"""The same in bodies, where no header names a session."""

FINAL = ("x-session-final", "x-dynamo-session-final")
COMPACTED = "x-claude-code-context-compacted"
CLASS = "x-claude-code-request-class"


@dataclass(frozen=True, slots=True)
class Caller:
    """What an HTTP request says beside its body."""

    tenant: str = ""  # the name of its API key
    timeout: float | None = None  # seconds for the engine; None: no limit
    session: SessionRef | None = None
    arrival: float | None = None  # time.monotonic() of the request's first line
    background: bool = False  # a line of a batch; no header can say so

    @classmethod
    def of(cls, request: Request, body: object = None) -> "Caller":
        """The caller of a request that has passed the layers.

        Args:
            body: the parsed body, which may name a session.

        Raises:
            InvalidRequest: X-Request-Timeout-Ms is no whole number of milliseconds over 0,
                X-Session-Id is too long, or X-Session-Final is neither true nor false.
        """
        written = request.headers.get(TIMEOUT)
        tenant = getattr(request.state, "tenant", "")
        session = session_of(request.headers, body)
        arrival = getattr(request.state, "arrival", None)
        background = getattr(request.state, "background", False)
        if written is None:
            return cls(tenant, None, session, arrival, background)
        if not MILLISECONDS.fullmatch(written) or int(written) == 0:
            raise InvalidRequest(
                f"{TIMEOUT} must be a whole number of milliseconds over 0, of at most 9 digits.",
                TIMEOUT,
            )
        return cls(tenant, int(written) / 1000, session, arrival, background)


ANONYMOUS = Caller()


def session_of(headers: Mapping[str, str], body: object = None) -> SessionRef | None:
    """The session that a request belongs to, or None.

    Raises:
        InvalidRequest: X-Session-Id is too long, or X-Session-Final is neither true nor false.
    """
    final = any(_flag(headers, name) for name in FINAL)
    given = headers.get(SESSION, "")
    if len(given) > MAX_SESSION or not given.isprintable():
        raise InvalidRequest(
            f"{SESSION} must have at most {MAX_SESSION} printable characters.", SESSION
        )
    name, parent = next(
        (
            (_name(headers.get(header)), _name(headers.get(of)))
            for header, of in SESSION_HEADERS
            if _name(headers.get(header))
        ),
        ("", ""),
    )
    if name and headers.get("x-claude-code-session-id") == name:
        agent, by = (_name(headers.get(header)) for header in CLAUDE_AGENTS)
        if agent:
            name, parent = f"{name}/{agent}", f"{name}/{by}" if by else name
    name = name or _named_by(body)
    if not name:
        return None
    return SessionRef(
        name,
        parent="" if parent == name else parent,
        final=final,
        fresh=bool(headers.get(COMPACTED)),
        aside=headers.get(CLASS) == "auxiliary",
    )


def _flag(headers: Mapping[str, str], name: str) -> bool:
    value = headers.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false.", name)
    return value == "true"


def _name(value: Any) -> str:
    """A name as it is, or "" for what can be none."""
    usable = isinstance(value, str) and len(value) <= MAX_SESSION and value.isprintable()
    return value if usable else ""


def _named_by(body: object) -> str:
    """The name that a body's members give to its session; "" if none does."""
    for member in SESSION_MEMBERS:
        value = _member(body, member)
        if isinstance(value, Mapping):
            value = value.get("id")
        if name := _name(value):
            return name
    metadata = _member(body, "metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if not isinstance(user, str):
        return ""
    try:  # Claude Code's is a JSON object; before, its end was the session
        named = json.loads(user)
        return _name(named.get("session_id")) if isinstance(named, dict) else ""
    except ValueError:
        return _name(user.partition("_session_")[2])


def _member(body: object, name: str) -> Any:
    value = getattr(body, name, None)
    return value if value is not None else (getattr(body, "model_extra", None) or {}).get(name)

"""The sender of a request, and how long it waits for the answer."""

import re
from dataclasses import dataclass

from starlette.requests import Request

from rayfin.actors.errors import InvalidRequest

TIMEOUT = "x-request-timeout-ms"
SESSION = "x-session-id"
MAX_SESSION = 256  # characters
MILLISECONDS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Caller:
    """What an HTTP request says beside its body."""

    tenant: str = ""  # the name of its API key
    timeout: float | None = None  # seconds for the engine; None: no limit
    session: str = ""  # requests of a session go to one engine
    arrival: float | None = None  # time.monotonic() of the request's first line
    background: bool = False  # a line of a batch; no header can say so

    @classmethod
    def of(cls, request: Request) -> "Caller":
        """The caller of a request that has passed the layers.

        Raises:
            InvalidRequest: X-Request-Timeout-Ms is no whole number of milliseconds over 0, or
                X-Session-Id is too long.
        """
        written = request.headers.get(TIMEOUT)
        tenant = getattr(request.state, "tenant", "")
        session = request.headers.get(SESSION, "")
        if len(session) > MAX_SESSION:
            raise InvalidRequest(f"{SESSION} must have at most {MAX_SESSION} characters.", SESSION)
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

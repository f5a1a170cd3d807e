"""How a process of Rayfin's writes its log: lines for people, or one JSON object each.

Only Rayfin's own logger, on the standard error, which Ray keeps in a file for each worker. Neither
prompts nor outputs nor keys are ever logged (tests/deployments/api/test_logs.py).
"""

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""The X-Request-Id of the HTTP request that the running task works for; for logs only."""


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, and where there are
    any ``request_id`` and ``exception``; ``always`` is in each of them.
    """

    def __init__(self, always: dict[str, str] | None = None) -> None:
        super().__init__()
        self._always = always or {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
        }
        if label := REQUEST.get():
            line["request_id"] = label
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return json.dumps(line, ensure_ascii=False)


class TextLines(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s")

    def format(self, record: logging.LogRecord) -> str:
        label = REQUEST.get()
        record.request = f" [{label}]" if label else ""
        return super().format(record)


def set_up(format: str, level: str, stream: TextIO | None = None, **always: str) -> None:
    """Rayfin's logger writes so from now on; to the standard error unless told otherwise.

    Args:
        format: "json" or "text".
        level: of ``LEVELS``; what is below is not written.
        always: what every JSON line says besides.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines(always) if format == "json" else TextLines())
    logger = logging.getLogger("rayfin")
    logger.handlers = [handler]
    logger.setLevel(LEVELS[level])
    logger.propagate = False

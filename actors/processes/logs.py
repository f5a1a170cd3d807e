"""Logging of Rayfin's processes: plain lines, or one JSON object a line.

Only Rayfin's own logger is set up. It writes to the standard error, which Ray keeps in a file for
each worker. Neither
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
"""The X-Request-Id of the running task's HTTP request; for logs only."""


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, if there are any
    ``request_id`` and ``exception``, and all of ``always``.
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
    """Plain lines, with the X-Request-Id at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s")

    def format(self, record: logging.LogRecord) -> str:
        label = REQUEST.get()
        record.request = f" [{label}]" if label else ""
        return super().format(record)


def set_up(format: str, level: str, stream: TextIO | None = None, **always: str) -> None:
    """Sets up Rayfin's logger; it writes to the standard error unless ``stream`` is given.

    Args:
        format: "json" or "text".
        level: a key of ``LEVELS``; records below it are dropped.
        always: further fields of every JSON line.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines(always) if format == "json" else TextLines())
    logger = logging.getLogger("rayfin")
    logger.handlers = [handler]
    logger.setLevel(LEVELS[level])
    logger.propagate = False

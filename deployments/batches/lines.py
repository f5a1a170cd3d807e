"""The lines of a batch's input file: read in bounded memory, and checked.

Source of the form: OpenAI's Batch API, https://platform.openai.com/docs/api-reference/batch.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from rayfin.actors.errors import InvalidLine

MESSAGES = "/v1/messages"
ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES),
    *("/v1/embeddings", "/v2/embed", "/classify", "/pooling"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
"""The routes that a line may name."""

MAX_LINE_BYTES = 8 * 2**20
MAX_CUSTOM_ID = 512  # characters
BOM = b"\xef\xbb\xbf"
SEEDED = frozenset({"/v1/chat/completions", "/v1/completions"})
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch."""

    number: int  # of its line in the file, from 1
    custom_id: str
    url: str
    body: dict[str, Any]

    def prepared(self, batch: str) -> dict[str, Any]:
        """The body to send: with a seed, where it gives none, and without a stored response.

        A line that is computed again after a crash then has the same text.
        """
        if self.url == "/v1/responses":
            return {**self.body, "store": False}
        if self.url not in SEEDED or self.body.get("seed") is not None:
            return self.body
        digest = hashlib.blake2b(f"{batch}\0{self.custom_id}".encode(), digest_size=8).digest()
        return {**self.body, "seed": int.from_bytes(digest, "big") >> (64 - SEED_BITS)}


class LineReader:
    """Iterates over (number, bytes) of the lines of a file that are not blank.

    A line over ``MAX_LINE_BYTES`` comes as None: its bytes are skipped and never held.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._number = 0

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        while data := self._file.readline(MAX_LINE_BYTES + 1):
            self._number += 1
            if len(data) > MAX_LINE_BYTES:
                while data and not data.endswith(b"\n"):
                    data = self._file.readline(MAX_LINE_BYTES)
                yield self._number, None
                continue
            if self._number == 1:
                data = data.removeprefix(BOM)
            if data := data.strip():
                yield self._number, data


def parse_line(number: int, data: bytes | None) -> Line:
    """Checks one line.

    Raises:
        InvalidLine: it is no request; ``code`` is invalid_json_line, line_too_long or
            invalid_line, and ``param`` names the field.
    """
    if data is None:
        limit = f"The line is longer than {MAX_LINE_BYTES} bytes."
        raise InvalidLine(limit, None, "line_too_long")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        text = f"The line is no JSON: {str(error)[:200]}."
        raise InvalidLine(text, None, "invalid_json_line") from None
    if not isinstance(value, dict):
        raise InvalidLine("The line must be a JSON object.", None, "invalid_json_line")
    custom_id = _custom_id(value)
    try:
        return _line(number, custom_id, value)
    except InvalidLine as error:
        error.custom_id = custom_id
        raise


def _line(number: int, custom_id: str, value: dict[str, Any]) -> Line:
    method, url, body = value.get("method", "POST"), value.get("url"), value.get("body")
    if method != "POST":
        raise _invalid(f"method must be POST, got {_shown(method)}.", "method")
    if not isinstance(url, str) or url not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise _invalid(f"url must be one of {known}, got {_shown(url)}.", "url")
    if not isinstance(body, dict):
        raise _invalid("body must be a JSON object.", "body")
    if body.get("stream"):
        raise _invalid("body.stream must not be set: a batch has whole answers.", "body.stream")
    if url == "/v1/responses" and body.get("background"):
        raise _invalid("body.background must not be set in a batch.", "body.background")
    return Line(number, custom_id, url, body)


def id_hash(custom_id: str) -> bytes:
    """16 bytes that stand for a custom_id in sets of many."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def _custom_id(value: dict[str, Any]) -> str:
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _invalid("custom_id must be a string that is not empty.", "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID:
        limit = f"custom_id must have at most {MAX_CUSTOM_ID} characters."
        raise _invalid(limit, "custom_id")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise _invalid("custom_id must be valid Unicode.", "custom_id") from None
    return custom_id


def _invalid(message: str, param: str) -> InvalidLine:
    return InvalidLine(message, param, "invalid_line")


def _shown(value: object) -> str:
    return repr(value)[:64]

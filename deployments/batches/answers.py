"""The lines of an output file, and the file that they are appended to."""

import json
import math
import os
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.batches.lines import id_hash
from rayfin.deployments.batches.objects import usage_of

BLOCK = 64 * 1024  # bytes


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What became of one line: a response of its endpoint, or an error without one."""

    custom_id: str | None  # None of a line that has none, or that of an earlier one
    number: int  # of the line
    status: int | None = None
    request_id: str = ""
    body: Any = None
    error: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.status is not None and self.status < 400

    @property
    def tokens(self) -> int:
        """Completion tokens, or prompt tokens where there are none (embeddings)."""
        usage = self.body.get("usage") if isinstance(self.body, dict) else None
        if not isinstance(usage, dict):
            return 0
        for name in ("completion_tokens", "output_tokens", "total_tokens"):
            if isinstance(value := usage.get(name), int):
                return value
        return 0

    def line(self) -> bytes:
        """OpenAI's form of it; ``line`` stands in the error of one without a custom_id."""
        response = None
        if self.status is not None:
            response = {
                "status_code": self.status,
                "request_id": self.request_id,
                "body": self.body,
            }
        error = self.error
        if error is not None and self.custom_id is None:
            error = {**error, "line": self.number}
        value = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


@dataclass(slots=True)
class Known:
    """What is answered already."""

    ids: set[bytes] = field(default_factory=set)  # id_hash of each custom_id
    numbers: set[int] = field(default_factory=set)  # of lines without one
    ok: int = 0
    failed: int = 0
    usage: Counter[str] = field(default_factory=Counter)  # tokens of all answers

    def has(self, answer: LineAnswer) -> bool:
        if answer.custom_id is None:
            return answer.number in self.numbers
        return id_hash(answer.custom_id) in self.ids

    def add(self, custom_id: str | None, number: int | None, body: Any = None, *, ok: bool) -> None:
        if custom_id is not None:
            self.ids.add(id_hash(custom_id))
        elif number is not None:
            self.numbers.add(number)
        self.ok += ok
        self.failed += not ok
        self.usage += usage_of(body)


class AnswerFile:
    """An output file that grows by whole lines. ``sync`` makes them durable.

    A process that dies while it writes leaves half a line, which ``open`` cuts off.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    @classmethod
    def open(cls, path: Path, known: Known) -> "AnswerFile":
        """Opens the file to append, and adds what it holds to ``known``.

        Raises:
            InvalidConfig: it holds something else than answers.
            OSError: it cannot be read or written.
        """
        cut_torn_line(path)
        if path.exists():
            read_known(path, known)
        return cls(path, path.open("ab"))

    def append(self, lines: bytes) -> None:
        """Writes whole lines; on an error the file ends where it did before.

        Raises:
            OSError: the disk is full, say.
        """
        end = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            self._reopen(end)
            raise

    def close(self) -> None:
        self._file.close()

    def _reopen(self, end: int) -> None:
        # What the buffer still holds must not be written later.
        raw = self._file.detach() if hasattr(self._file, "detach") else None
        if raw is not None:
            raw.close()
        os.truncate(self._path, end)
        self._file = self._path.open("ab")


def cut_torn_line(path: Path) -> None:
    """Cuts the file after its last newline."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    with path.open("r+b") as file:
        end = size
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())


def read_known(path: Path, known: Known) -> None:
    """Adds the answers of a file to ``known``.

    Raises:
        InvalidConfig: a line is none.
    """
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            try:
                value = json.loads(data)
                custom_id, error, response = value["custom_id"], value["error"], value["response"]
                line = error.get("line") if isinstance(error, dict) else None
                status = response["status_code"] if response is not None else None
                body = response.get("body") if response is not None else None
                ok = error is None and status is not None and status < 400
            except (ValueError, KeyError, TypeError):
                raise InvalidConfig(
                    f"line {number} of {path} is no answer of a batch: name another file",
                    "output_file",
                ) from None
            known.add(custom_id, line, body, ok=ok)


def sort_answers(path: Path, numbers: Mapping[bytes, int]) -> None:
    """Brings the answers of a file into the order of their lines; it is old or new at any moment.

    Args:
        numbers: of the lines, by the ``id_hash`` of their custom_ids. Other answers come last.

    Raises:
        OSError: the disk is full, say.
    """
    places: list[tuple[float, int, int]] = []
    with path.open("rb") as file:
        start = 0
        for data in file:
            value = json.loads(data)
            custom_id, error = value["custom_id"], value["error"]
            number = (error or {}).get("line")
            if custom_id is not None:
                number = numbers.get(id_hash(custom_id))
            places.append((math.inf if number is None else number, start, len(data)))
            start += len(data)
        if places == sorted(places):
            return
        ordered = Path(f"{path}.ordered")
        with ordered.open("wb") as target:
            for _, start, size in sorted(places):
                file.seek(start)
                target.write(file.read(size))
            target.flush()
            os.fsync(target.fileno())
    os.replace(ordered, path)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""``rayfin run-batch``: from one file to another, and again from where it was interrupted.

Answers are appended to ``OUT.partial``, which becomes OUT when all lines are answered. So OUT is
absent or whole, and what an interrupted run has answered is never computed again.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rayfin.actors.errors import InvalidConfig, InvalidLine
from rayfin.deployments.batches.answers import (
    AnswerFile,
    Known,
    LineAnswer,
    read_known,
    sort_answers,
    sync_folder,
)
from rayfin.deployments.batches.line_run import Work
from rayfin.deployments.batches.lines import LineReader, id_hash, parse_line

SUFFIX = ".partial"


@dataclass(slots=True)
class JobCounts:
    """How far a job is; lines count when their answers are durable."""

    total: int | None  # lines of the input that are not blank; None: not known
    earlier: int = 0  # answered by earlier runs
    ok: int = 0
    failed: int = 0
    tokens: int = 0  # of this run's answers

    @property
    def done(self) -> int:
        return self.ok + self.failed


class FileJob:
    """One input file and its output file. One process at a time works on an output file.

    Args:
        source: "-" is standard input.
        ordered: the output has the order of the input; else that in which the answers came.

    Raises:
        InvalidConfig: the input cannot be read, the output cannot be written, holds something else
            than answers, or is written by another process.
    """

    def __init__(self, source: str, output: str, stdin: BinaryIO, *, ordered: bool = True) -> None:
        self._source = source
        self._output = Path(output)
        self._partial = Path(output + SUFFIX)
        self._stdin = stdin
        self._ordered = ordered
        self._numbers: dict[bytes, int] = {}  # of the lines read so far, by id_hash
        self._check_paths()
        self._lock = self._locked()
        self._known = Known()
        self._answers = self._opened()
        total = None if source == "-" else count_lines(Path(source))
        self.counts = JobCounts(total, self._known.ok + self._known.failed)
        self.counts.ok, self.counts.failed = self._known.ok, self._known.failed

    @property
    def partial(self) -> Path:
        return self._partial

    def lines(self) -> Iterator[Work]:
        """The lines without an answer; a bad one comes as its answer."""
        seen = self._numbers
        seen.clear()
        file = self._stdin if self._source == "-" else Path(self._source).open("rb")
        with file:
            for number, data in LineReader(file):
                try:
                    line = parse_line(number, data)
                    key = id_hash(line.custom_id)
                    if key in seen:
                        shown = line.custom_id[:64]
                        text = f"An earlier line has the custom_id {shown!r}."
                        raise InvalidLine(text, "custom_id", "duplicate_custom_id")
                    seen[key] = number
                except InvalidLine as error:
                    answer = bad_line(number, error, seen)
                    if not self._known.has(answer):
                        yield answer
                    continue
                if key not in self._known.ids:
                    yield line

    def record(self, answers: list[LineAnswer]) -> None:
        """Appends the answers, and counts them when they are durable.

        Raises:
            OSError: the disk is full, say.
        """
        self._answers.append(b"".join(answer.line() for answer in answers))
        for answer in answers:
            self.counts.ok += answer.ok
            self.counts.failed += not answer.ok
            self.counts.tokens += answer.tokens

    def finish(self) -> None:
        """Every line is answered: the output gets its order and its name."""
        self._answers.close()
        if self._ordered:
            if not self._numbers and self._source != "-":  # an earlier run has answered all
                for _ in self.lines():
                    pass
            sort_answers(self._partial, self._numbers)
        os.replace(self._partial, self._output)
        sync_folder(self._output.parent)
        Path(self._lock.name).unlink(missing_ok=True)
        self._lock.close()

    def close(self) -> None:
        """Keeps what there is, for the next run."""
        self._answers.close()
        self._lock.close()

    def _check_paths(self) -> None:
        if self._source != "-":
            path = Path(self._source)
            if self._source.startswith(("http://", "https://")):
                raise InvalidConfig("input_file must be a local file, or - for stdin", "input_file")
            if not path.is_file():
                raise InvalidConfig(f"there is no file {path}", "input_file")
            if path.absolute() in (self._output.absolute(), self._partial.absolute()):
                raise InvalidConfig("output_file must not be input_file", "output_file")
        if str(self._output).startswith(("http:", "https:")):
            raise InvalidConfig("output_file must be a local file", "output_file")
        if self._output.is_dir() or not self._output.parent.is_dir():
            raise InvalidConfig(f"{self._output} cannot be a file", "output_file")

    def _locked(self) -> BinaryIO:
        """Holds the name of the output, until the process ends however it does."""
        path = Path(f"{self._partial}.lock")
        try:
            lock = path.open("wb")
        except OSError as error:
            raise InvalidConfig(f"{self._output}: {error.strerror}", "output_file") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                raise BlockingIOError  # its holder has just finished, and removed the name
        except OSError:
            lock.close()
            raise InvalidConfig(
                f"another run-batch writes to {self._output}", "output_file"
            ) from None
        return lock

    def _opened(self) -> AnswerFile:
        if self._output.exists() and not self._partial.exists():
            read_known(self._output, Known())  # refuses a file that is something else
            copy = Path(f"{self._partial}.copy")
            shutil.copyfile(self._output, copy)
            os.replace(copy, self._partial)
        return AnswerFile.open(self._partial, self._known)


def bad_line(number: int, error: InvalidLine, seen: dict[bytes, int]) -> LineAnswer:
    """The answer of a line that is no request; it has the custom_id that is the line's alone."""
    said = {"code": error.code, "message": error.message, "param": error.param}
    custom_id = error.custom_id
    if custom_id is not None:
        if seen.setdefault(id_hash(custom_id), number) != number:
            custom_id = None
    return LineAnswer(custom_id, number, error=said)


def count_lines(path: Path) -> int:
    """Lines of a file that are not blank."""
    with path.open("rb") as file:
        return sum(1 for _ in LineReader(file))

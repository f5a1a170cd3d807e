"""Other engines, each a process in an environment of its own, run on the same jobs in turn.

A peer is a script under benchmarks/peers. It reads a line of JSON per command and answers with
one; its model stays loaded between runs, so that engines can take turns:

    {"model": folder, "settings": {...}}       -> {"ready": seconds, "name": ..., "version": ...}
    {"jobs": [[arrival, prompt, output], ...]} -> {"pieces": [[[seconds, tokens], ...], ...]}
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rayfin.actors.errors import InvalidConfig, PeerFailed
from rayfin.deployments.bench.measures import Timeline
from rayfin.deployments.bench.workload import Job

TAIL = 2000  # characters of a dead peer's stderr that are worth reading


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """How to start a peer: its script, the Python that has its packages, and its settings."""

    name: str
    python: str
    script: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, folder: Path) -> "PeerSpec":
        """Reads "NAME=PYTHON" or "NAME=PYTHON,key=value,..."; the script is folder/NAME.py.

        "LABEL:NAME=PYTHON,..." runs a peer under another label, with other settings.

        Raises:
            InvalidConfig: anything else, or a peer that there is none of.
        """
        left, found, right = text.partition("=")
        label, _, script = left.rpartition(":")
        python, *settings = right.split(",")
        path = folder / f"{script}.py"
        if not found or not path.is_file():
            known = ", ".join(sorted(own.stem for own in folder.glob("*.py") if own.stem != "peer"))
            raise InvalidConfig(
                f"peer must be NAME=PYTHON with a script in {folder} ({known}), got {text!r}",
                "peer",
            )
        return cls(label or script, python, path, dict(_setting(own) for own in settings))


class Peer:
    """A peer's process. Use it as a context."""

    def __init__(self, spec: PeerSpec, model: Path, stderr: Path) -> None:
        self.spec = spec
        self.ready_seconds = 0.0
        self.version = ""
        self._model = model
        self._stderr = stderr
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Peer":
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(
                [self.spec.python, str(self.spec.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        ready = self._ask({"model": str(self._model), "settings": self.spec.settings})
        self.ready_seconds, self.version = float(ready["ready"]), str(ready["version"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()  # the end of its commands
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def run(self, jobs: Sequence[Job]) -> list[Timeline]:
        """The jobs' timelines, on the peer's clock.

        Raises:
            PeerFailed: the peer is gone.
        """
        wire = [[job.arrival, job.prompt, job.output_tokens] for job in jobs]
        pieces = self._ask({"jobs": wire})["pieces"]
        return [_timeline(job, own) for job, own in zip(jobs, pieces, strict=True)]

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError):
            tail = self._stderr.read_text(errors="replace")[-TAIL:]
            raise PeerFailed(f"{self.spec.name} is gone. Its last words:\n{tail}") from None
        if "error" in answer:
            raise PeerFailed(f"{self.spec.name}: {answer['error']}")
        return answer


def _timeline(job: Job, pieces: list[list[float]]) -> Timeline:
    own = Timeline(job.arrival, len(job.prompt), [(when, int(count)) for when, count in pieces])
    if own.tokens != job.output_tokens:
        own.error = f"{own.tokens} tokens came, of {job.output_tokens}"
    return own


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

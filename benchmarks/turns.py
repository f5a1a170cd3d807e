"""Runs the same jobs on several engines in turn, each in a process with its own environment.

A peer is a script of peers/. It reads a line of JSON per command and answers with
one. Its model stays loaded between runs, so that engines can alternate:

    {"model": folder, "settings": {...}}       -> {"ready": seconds, "name": ..., "version": ...}
    {"jobs": [[arrival, prompt, output], ...]} -> {"pieces": [[[seconds, tokens], ...], ...]}

The first command may have a workload beside plain tokens: {"name": "guided", "schema": {...}},
whose answers follow a JSON schema, or {"name": "embed"}, whose requests get one piece, the vector.
"""

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rayfin.actors.errors import InvalidConfig, ServerError
from rayfin.deployments.bench.measures import Figures, Timeline
from rayfin.deployments.bench.report import median
from rayfin.deployments.bench.workload import Job, varied

PEERS = Path(__file__).with_name("peers")
TAIL = 2000  # last characters of a dead peer's stderr in the error


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """A peer's script, the Python that has its packages, and its settings."""

    name: str
    python: str
    script: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, folder: Path) -> "PeerSpec":
        """Parses "NAME=PYTHON" or "NAME=PYTHON,key=value,..."; the script is folder/NAME.py.

        "LABEL:NAME=PYTHON,..." runs a peer under another label, with other settings.

        Raises:
            InvalidConfig: the text is malformed, or the peer is unknown.
        """
        left, equals, right = text.partition("=")
        label, _, script = left.rpartition(":")
        python, *settings = right.split(",")
        path = folder / f"{script}.py"
        if not equals or not path.is_file():
            known = ", ".join(
                sorted(file.stem for file in folder.glob("*.py") if file.stem != "peer")
            )
            raise InvalidConfig(
                f"peer must be NAME=PYTHON with a script in {folder} ({known}), got {text!r}",
                "peer",
            )
        return cls(label or script, python, path, dict(map(_setting, settings)))


class Peer:
    """A peer's process, as a context manager."""

    def __init__(
        self,
        spec: PeerSpec,
        model: Path,
        stderr: Path,
        workload: dict[str, Any] | None = None,
    ) -> None:
        self.spec = spec
        self.ready_seconds = 0.0
        self.version = ""
        self._model = model
        self._stderr = stderr
        self._workload = workload
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
        load: dict[str, Any] = {"model": str(self._model), "settings": self.spec.settings}
        if self._workload is not None:
            load["workload"] = self._workload
        ready = self._ask(load)
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
            process.stdin.close()  # ends the peer
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def run(self, jobs: Sequence[Job]) -> list[Timeline]:
        """Runs the jobs and returns their timelines, on the peer's clock.

        Raises:
            ServerError: the peer died or reports an error.
        """
        wire = [[job.arrival, job.prompt, job.output_tokens] for job in jobs]
        pieces = self._ask({"jobs": wire})["pieces"]
        return [_timeline(*pair) for pair in zip(jobs, pieces, strict=True)]

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
            raise ServerError(f"{self.spec.name} died. The end of its stderr:\n{tail}") from None
        if "error" in answer:
            raise ServerError(f"{self.spec.name}: {answer['error']}")
        return answer


def take_turns(
    specs: Sequence[PeerSpec],
    model: Path,
    jobs: Sequence[Job],
    rounds: int,
    report: Callable[[str], object],
    workload: dict[str, Any] | None = None,
) -> dict[str, list[list[Timeline]]]:
    """Returns timelines by peer, one list for each round; an uncounted round warms up.

    The peers alternate (A B A B), so that a slow minute hits all of them. Every round has other
    tokens in its prompts, of the same lengths and with the same shared prefixes, so that no cache
    helps.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = []
        for spec in specs:
            log = folder / f"{spec.name}.log"
            peers.append(stack.enter_context(Peer(spec, model, log, workload)))
            report(f"{spec.name}: {peers[-1].version}, ready in {peers[-1].ready_seconds:.1f} s")
        results: dict[str, list[list[Timeline]]] = {spec.name: [] for spec in specs}
        for number in range(rounds + 1):
            for peer in peers:
                timelines = peer.run(varied(jobs, number))
                if number:
                    results[peer.spec.name].append(timelines)
    return results


def medians(rounds: Sequence[Figures]) -> list[float]:
    """Gives output tokens/s, then ms: TTFT p50 and p99, TPOT p50, ITL p99; the middle round's."""
    pairs = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("itl", "p99"))
    return [
        median([run.output_per_second for run in rounds]),
        *(1000 * median([getattr(getattr(run, n), p) or 0.0 for run in rounds]) for n, p in pairs),
    ]


def _timeline(job: Job, pieces: list[list[float]]) -> Timeline:
    timeline = Timeline(job.arrival, len(job.prompt), [(at, int(count)) for at, count in pieces])
    timeline.expect(job.output_tokens)
    return timeline


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value

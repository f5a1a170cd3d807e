"""The program that forks a Ray's workers, as the program that starts the Ray has it."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rayfin.actors.processes import worker_forker

WORKERS_OWN = (
    "rayfin.actors.processes.spared_imports",
    "ray._private.workers.default_worker",
)
"""Modules of every worker, in the order of their import."""


class WorkerForks:
    """Starts ``worker_forker.py``, whose imports begin at once. It ends with this process.

    The environment is that of the workers to be.

    Args:
        preload: modules that all workers have, beside Ray's; none of them starts a thread.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._folder = tempfile.mkdtemp(prefix="rayfin-")  # no other user's process gets in
        self.path = str(Path(self._folder, "workers"))
        """Of the socket by which workers come."""
        program = str(Path(str(worker_forker.__file__)).resolve())
        self._process = subprocess.Popen(
            [sys.executable, program, self.path, ",".join((*WORKERS_OWN, *preload))],
            stdin=subprocess.PIPE,  # whose end says that this process has ended
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """Ends the program. Workers stay; those to come are no forks."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "WorkerForks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

"""Starts the program that forks a Ray's workers, and a Ray that has its workers from there.

Ray has no setting for how its raylet starts workers. So the command line of the raylet is changed
where Ray starts it; a Ray that writes it otherwise starts its workers as ever.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rayfin.actors.timing import FORK_ANSWER_SECONDS

PROGRAMS = Path(__file__).resolve().parent

WORKER_MODULE = "ray._private.workers.default_worker"
"""Ray's program of a worker, as a module."""

COMMAND = "--python_worker_command="
AHEAD = "--num_prestart_python_workers="
"""A raylet's flags: how it starts workers, and how many before it takes a program. Forks are there
at once."""


class WorkerForks:
    """Starts ``worker_forker.py``, whose imports begin at once. It ends with this process.

    The environment is that of the workers to be.

    Args:
        preload: modules that all workers have, beside Ray's; none of them starts a thread.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._folder = tempfile.mkdtemp(prefix="rayfin-")  # no other user's process gets in
        self._path = str(Path(self._folder, "workers"))  # of the socket by which workers come
        program = str(PROGRAMS / "worker_forker.py")
        self._process = subprocess.Popen(
            [sys.executable, program, self._path, ",".join((WORKER_MODULE, *preload))],
            stdin=subprocess.PIPE,  # whose end says that this process has ended
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @contextmanager
    def for_new_ray(self) -> Iterator[None]:
        """Has a Ray that this process starts meanwhile take its workers from here."""
        from ray._private import services  # not before the program has started, which imports too

        ray_worker = str(Path(services.RAY_PATH, "_private", "workers", "default_worker.py"))
        program = str(PROGRAMS / "forked_worker.py")
        # A Python without site-packages starts in a third of the time.
        ours = ["-I", "-S", program, self._path, str(FORK_ANSWER_SECONDS), ray_worker]

        def changed(word: str) -> str:
            if word.startswith(AHEAD):
                return f"{AHEAD}0"
            if word.startswith(COMMAND):
                quoted = subprocess.list2cmdline
                return word.replace(quoted([ray_worker]), quoted(ours))
            return word

        def start(command: Sequence[str], *args: Any, **options: Any) -> Any:
            return original([changed(word) for word in command], *args, **options)

        original = services.start_ray_process
        services.start_ray_process = start
        try:
            yield
        finally:
            services.start_ray_process = original

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

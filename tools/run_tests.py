"""Runs all tests in two processes at a time: those that start Ray in one, all others in the other.

    python tools/run_tests.py [--types] [pytest's arguments]        # make test

Two clusters of Ray at once would starve each other, so tests/e2e is one piece of work. The others
are smaller pieces: a process that has ended is followed by the next one, so no core is idle for
long. ``--types`` is one more piece, mypy. With a path among the arguments it is one plain pytest.
"""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # pytest's exit status where -k or -m picks nothing
FAILED = 1  # of a command that could not be run, or whose output could not be printed
RAY = "tests/e2e"
PIECES = (  # the last one is all that no other has
    "tests/actors/runner",
    "tests/kernels",
    "tests/deployments",
    "tests/e2e/test_wheel_aarch64.py",
    "tests/e2e/test_wheel.py",
    "tests/actors",
    "tests",
)
MYPY = [sys.executable, "-m", "mypy"]


def environment() -> dict[str, str]:
    """Python keeps what it compiles: hundreds of processes import Rayfin."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def pytest_of(piece: str, arguments: list[str]) -> list[str]:
    """The command that runs a piece without what lies in other pieces."""
    others = [own for own in (RAY, *PIECES) if own != piece and own.startswith(f"{piece}/")]
    ignored = [f"--ignore={own}" for own in others]
    command = [sys.executable, "-m", "pytest", *arguments, piece, *ignored]
    return [*command, "-p", "no:cacheprovider"]  # the pieces would overwrite each other's


class Work:
    """Commands that two threads run; prints the output of each command in one go."""

    def __init__(self, commands: list[list[str]]) -> None:
        self._commands: SimpleQueue[list[str]] = SimpleQueue()
        for command in commands:
            self._commands.put(command)
        self._printing = threading.Lock()
        self.codes: list[int] = []

    def run(self, first: list[str] | None = None) -> None:
        """Runs ``first``, then commands until none is left."""
        command = first or self._next()
        while command is not None:
            code = FAILED
            try:
                code = self._run(command)
            finally:
                self.codes.append(code)
            command = self._next()

    def stop(self) -> None:
        """Begins no other command."""
        while self._next() is not None:
            pass

    def _next(self) -> list[str] | None:
        try:
            return self._commands.get_nowait()
        except Empty:
            return None

    def _run(self, command: list[str]) -> int:
        with tempfile.TemporaryFile() as log:
            done = subprocess.run(
                command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT
            )
            with self._printing:
                self._print(command, log)
            # mypy picks no tests
            return NO_TESTS if command == MYPY and not done.returncode else done.returncode

    def _print(self, command: list[str], log: IO[bytes]) -> None:
        log.seek(0)
        print(f"\n{' '.join(command[1:])}:", flush=True)
        sys.stdout.buffer.write(log.read())
        sys.stdout.flush()


def status(codes: list[int]) -> int:
    """The exit status of commands with these ones; of a signal it is negative."""
    failures = set(codes) - {0, NO_TESTS}
    return max(failures) if failures else min(codes)


def run_all(arguments: list[str], first: list[list[str]]) -> int:
    """Runs ``first`` and all pieces; returns an exit status: see ``status``."""
    work = Work([*first, *(pytest_of(piece, arguments) for piece in PIECES)])
    other = threading.Thread(target=work.run)
    other.start()
    try:
        work.run(first=pytest_of(RAY, arguments))
    except KeyboardInterrupt:
        work.stop()
        raise
    finally:
        other.join()
    return status(work.codes)


def main() -> int:
    arguments = sys.argv[1:]
    first = [MYPY] if "--types" in arguments else []
    arguments = [argument for argument in arguments if argument != "--types"]
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        commands = [*first, [sys.executable, "-m", "pytest", *arguments]]
        codes = [subprocess.run(command, cwd=ROOT).returncode for command in commands]
        return next((code for code in codes if code), 0)
    return run_all(arguments, first)


if __name__ == "__main__":
    sys.exit(main())

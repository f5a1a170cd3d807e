"""``make test``: the exit status of many commands."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import run_tests
from run_tests import FAILED, MYPY, NO_TESTS, Work, status


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([0, NO_TESTS], 0),
        ([NO_TESTS, NO_TESTS], NO_TESTS),
        ([0, 1, NO_TESTS], 1),
        ([0, -9], -9),
    ],
)
def test_status(codes: list[int], expected: int) -> None:
    assert status(codes) == expected


def test_mypy_counts_as_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a ``-k`` that picks nothing does not look like tests that pass."""
    monkeypatch.setattr(run_tests, "MYPY", [sys.executable, "-c", ""])
    work = Work([run_tests.MYPY, [sys.executable, "-c", "raise SystemExit(5)"]])
    work.run()
    assert status(work.codes) == NO_TESTS


def test_a_command_that_cannot_run_has_failed() -> None:
    work = Work([[sys.executable, "-c", ""], ["no-such-program"]])
    with pytest.raises(OSError):
        work.run()
    assert status(work.codes) == FAILED


def test_one_path_ends_as_its_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a signal ends it, after types that are right."""

    def ended(command: list[str], **_: object) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.CompletedProcess(command, 0 if command == MYPY else -11)

    monkeypatch.setattr(run_tests.subprocess, "run", ended)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--types", "tests/kernels"])
    assert run_tests.main() == -11

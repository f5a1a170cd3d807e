"""Niceness, seen from a process of its own: a process cannot take its own back."""

import os
import subprocess
import sys

import pytest

from rayfin.actors.priority import BEHIND_RUNNERS, RAY_NICENESS, keep_workers_equal

SCRIPT = """
import os
from rayfin.actors.priority import step_behind_runners
before = os.nice(0)
step_behind_runners()
print(os.nice(0) - before)
"""


def test_a_process_steps_back() -> None:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) == min(BEHIND_RUNNERS, 19 - os.nice(0))


def test_an_operators_niceness_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAY_NICENESS, "10")
    keep_workers_equal()
    assert os.environ[RAY_NICENESS] == "10"


def test_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAY_NICENESS, "")  # so that monkeypatch takes back what is set now
    monkeypatch.delenv(RAY_NICENESS)
    keep_workers_equal()
    assert os.environ[RAY_NICENESS] == "0"

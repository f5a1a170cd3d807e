"""Imported by every Python process of a chaos cluster, whose PYTHONPATH begins with this folder.

CHAOS_CLOCK shifts the wall clock by the seconds in the cluster's file ``clock``. CHAOS_RPC makes
Ray fail calls, as it says, in processes that start once there is a file ``rpc``. CHAOS_RUNNER=hash
or script replaces the model runner by hash_runner.py's or script_runner.py's from outside, for the
product has no option for fakes.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

REPLACED = "rayfin.actors.runner.model_runner"


class FakeRunnerFinder(importlib.abc.MetaPathFinder):
    """Finds a fake under the model runner's name."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != REPLACED:
            return None
        return importlib.util.spec_from_file_location(
            name, Path(__file__).with_name(f"{os.environ['CHAOS_RUNNER']}_runner.py")
        )


def shift_clock(path: Path) -> None:
    """Shifts ``time.time`` and ``time.time_ns`` by the seconds in a file."""
    real = time.time

    def shifted() -> float:
        try:
            return real() + float(path.read_text())
        except (OSError, ValueError):  # the clock is not shifted
            return real()

    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)


if os.environ.get("CHAOS_CLOCK"):
    shift_clock(Path(os.environ["RAY_TMPDIR"], "clock"))


def fail_calls(how: str) -> None:
    """Makes Ray fail calls, before it is imported, and creates a marker file."""
    folder = Path(os.environ["RAY_TMPDIR"])
    if (folder / "rpc").exists():
        os.environ["RAY_testing_rpc_failure"] = how
        (folder / f"rpc-{os.getpid()}").touch()


if os.environ.get("CHAOS_RPC"):
    fail_calls(os.environ["CHAOS_RPC"])
if os.environ.get("CHAOS_RUNNER") in ("hash", "script"):
    sys.meta_path.insert(0, FakeRunnerFinder())

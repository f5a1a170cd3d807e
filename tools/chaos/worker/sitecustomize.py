"""Read by every Python of a chaos run's cluster, whose PYTHONPATH begins with this folder.

With CHAOS_CLOCK set, its wall clock is ahead by the seconds that the cluster's file ``clock`` has.
With CHAOS_RPC set, Ray fails calls as it says in processes that start once there is a file ``rpc``.
With CHAOS_RUNNER=hash, the model runner of a worker is hash_runner.py's: the product has no door
for a fake model, so it is put under it from outside, where all that is Ray stays as it is.
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


class HashRunnerFinder(importlib.abc.MetaPathFinder):
    """Finds hash_runner.py under the model runner's name."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != REPLACED:
            return None
        return importlib.util.spec_from_file_location(
            name, Path(__file__).with_name("hash_runner.py")
        )


def shift_clock(path: Path) -> None:
    """Makes ``time.time`` and ``time.time_ns`` go by a file."""
    real = time.time

    def shifted() -> float:
        try:
            return real() + float(path.read_text())
        except (OSError, ValueError):  # nobody has touched the clock
            return real()

    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)


if os.environ.get("CHAOS_CLOCK"):
    shift_clock(Path(os.environ["RAY_TMPDIR"], "clock"))


def fail_calls(how: str) -> None:
    """Has Ray, which is yet to be imported, fail calls; leaves a mark."""
    folder = Path(os.environ["RAY_TMPDIR"])
    if (folder / "rpc").exists():
        os.environ["RAY_testing_rpc_failure"] = how
        (folder / f"rpc-{os.getpid()}").touch()


if os.environ.get("CHAOS_RPC"):
    fail_calls(os.environ["CHAOS_RPC"])
if os.environ.get("CHAOS_RUNNER") == "hash":
    sys.meta_path.insert(0, HashRunnerFinder())

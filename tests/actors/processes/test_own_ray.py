"""The processes of a Ray that Rayfin starts."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

WATCHERS = {"dashboard.py", "monitor.py", "log_monitor.py", "agent.py"}

PROGRAM = """
import json, os, sys
import psutil, ray
from rayfin.actors.processes.own_ray import start_ray

original = ray._private.node.Node
start_ray(log_to_driver=json.loads(sys.argv[1]), num_cpus=1, logging_level="ERROR",
          object_store_memory=100 << 20)
words = [word for own in psutil.Process().children(recursive=True) for word in own.cmdline()]

@ray.remote
def answer():
    return 42

print(json.dumps({
    "programs": sorted({os.path.basename(word) for word in words}),
    "answer": ray.get(answer.remote()),
    "restored": ray._private.node.Node is original,
}))
"""


def started(*, shows_logs: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as folder:
        own = {**os.environ, "RAY_TMPDIR": folder}
        own.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(shows_logs)],
            env=own,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("shows_logs", [False, True])
def test_a_ray_of_ours_has_no_process_that_watches_it(shows_logs: bool) -> None:
    found = started(shows_logs=shows_logs)
    programs = found["programs"]
    assert isinstance(programs, list)
    assert {"gcs_server", "raylet"} <= set(programs)
    assert WATCHERS.intersection(programs) == ({"log_monitor.py"} if shows_logs else set())
    assert found["answer"] == 42
    assert found["restored"]


def test_this_file_names_the_programs_of_ray() -> None:
    ray_folder = Path(str(ray.__file__)).parent
    programs = {path.name for path in ray_folder.rglob("*.py")}
    assert WATCHERS <= programs

"""Workers that are forks: what they have from the start, and what they have of their own."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from rayfin.actors.processes import worker_forker

PROGRAM = """
import json, os, resource, sys
from pathlib import Path

# Ray raises it in this process, once the forker has started.
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
if sys.argv[1] == "forks":
    os.environ["MARK"] = "all"
    from rayfin.actors.processes.environment import set_ray_environment
    from rayfin.actors.processes.worker_forks import WorkerForks

    set_ray_environment()
    forks = WorkerForks(["this", "no.such.module", "rayfin.actors.metrics.hub", "ray.serve"])
else:
    forks = None
import psutil, ray
from contextlib import nullcontext

start = ray._private.services.start_ray_process
with forks.for_new_ray() if forks else nullcontext():
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=1, logging_level="ERROR",
             object_store_memory=100 << 20)
assert ray._private.services.start_ray_process is start


@ray.remote(num_cpus=0)
class Worker:
    def facts(self):
        import importlib.util
        import random
        import resource
        import signal

        own = psutil.Process()
        return {
            "has": sorted({"this", "ray.serve", "torch", "pandas"} & set(sys.modules)),
            "finds": bool(importlib.util.find_spec("pandas")),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "pid": os.getpid(),
            "group": os.getpgid(0),
            "parent": [Path(word).name for word in own.parent().cmdline()][-3:-2],
            "mark": os.environ.get("MARK"),
            "other": os.environ.get("OTHER"),
            "random": random.random(),
            "object": ray.put(1).hex(),
            "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "context": ray.get_runtime_context().get_node_id(),
        }

    def crash(self):
        os._exit(1)


workers = [Worker.remote() for _ in range(3)]
facts = ray.get([worker.facts.remote() for worker in workers])
other = Worker.options(runtime_env={"env_vars": {"OTHER": "own"}}).remote()
facts.append(ray.get(other.facts.remote()))
dead = False
try:
    ray.get(workers[0].crash.remote())
except ray.exceptions.RayActorError:
    dead = True
if forks:
    forks.close()
facts.append(ray.get(Worker.remote().facts.remote()))
print(json.dumps({"facts": facts, "dead": dead, "node": ray.get_runtime_context().get_node_id()}))
"""


def run(how: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as folder:
        own = {**os.environ, "RAY_TMPDIR": folder}
        own.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how], env=own, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_workers_are_forks_that_differ_in_what_must_differ() -> None:
    found = run("forks")
    forks, other, late = found["facts"][:3], found["facts"][3], found["facts"][4]
    for fork in forks:
        assert fork["has"] == ["ray.serve", "this"]
        assert fork["parent"] == ["worker_forker.py"]
        assert fork["finds"] == (importlib.util.find_spec("pandas") is not None)
        assert fork["mark"] == "all"
        assert fork["files"] == other["files"] > 1024
        assert fork["group"] == fork["pid"]
        assert fork["children"]
        assert fork["context"] == found["node"]
    for name in ("pid", "random", "object"):
        assert len({fork[name] for fork in forks}) == len(forks), name
    assert found["dead"]
    # One with an environment of its own is none, and none is when the program has ended.
    assert other["other"] == "own"
    assert other["mark"] == late["mark"] == "all"
    for plain in (other, late):
        assert "this" not in plain["has"]
        assert plain["parent"] != ["worker_forker.py"]


def test_a_ray_without_forks_has_workers_too() -> None:
    assert len(run("plain")["facts"]) == 5


def test_an_environment_is_plain_but_for_what_a_raylet_gives() -> None:
    base = {"PATH": "/bin", "HOME": "/root"}
    assert worker_forker.is_plain({**base, "RAY_JOB_ID": "01", "OMP_NUM_THREADS": "1"}, base)
    assert not worker_forker.is_plain({**base, "HOME": "/other"}, base)
    assert not worker_forker.is_plain({"PATH": "/bin"}, base)
    assert not worker_forker.is_plain({**base, "MINE": "1"}, base)

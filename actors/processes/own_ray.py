"""A Ray that Rayfin starts for itself: without the processes that serve only those who watch one.

``ray.init`` starts six processes beside the workers. Four of them do nothing for an engine: the
dashboard's, even where no dashboard is asked for (it would report usage statistics), the agent that
measures this node for it, the monitor of the autoscaler, which has no cloud here, and the monitor
of log files, which sends what workers print to a program that shows it. And ``ray.init`` waits for
the first two, and for the agent for runtime environments.

The raylet gets another program in place of its dashboard's agent (``idle_agent.py``). With workers
that are forks of one process (``worker_forks.py``) its other agent starts late (``late_agent.py``).

Ray has options against two of them (``ray start --include-log-monitor=false``), but not for
``ray.init``. So its ``Node`` is replaced while that runs. What a later Ray does otherwise stays as
it is.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import ray._private.node
from ray import _raylet
from ray._private import ray_constants, services

from rayfin.actors.processes import forked_worker, idle_agent, late_agent
from rayfin.actors.processes.environment import set_ray_environment
from rayfin.actors.processes.worker_forks import WorkerForks
from rayfin.actors.timing import FORK_ANSWER_SECONDS

NO_DASHBOARD = "127.0.0.1:0"
"""The dashboard's address: without one, Ray's agent looks for it every second, and logs that it is
not there."""

PORTS = ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME")
"""Ray's constants for the ports of an agent."""

AGENT = str(Path(services.RAY_PATH, "dashboard", "agent.py"))
RUNTIME_AGENT = str(Path(services.RAY_PATH, "_private", "runtime_env", "agent", "main.py"))
WORKER = str(Path(services.RAY_PATH, "_private", "workers", "default_worker.py"))
"""Ray's programs that others take the place of."""

WORKERS = "--python_worker_command="
AHEAD = "--num_prestart_python_workers="
"""A raylet's flags: how it starts workers, and how many before it takes a program. Forks are there
at once."""

NO_PORT = -1
"""What Ray's own agent reports for a port if it has not what it needs to serve it."""


class _Node(ray._private.node.Node):
    """A node; the head processes that it starts are the GCS and the raylet."""

    shows_logs = False
    workers: str | None = None

    def __init__(self, ray_params: Any, head: bool = False, **options: Any) -> None:
        if head:  # else it joins a cluster
            for name, value in (("include_log_monitor", self.shows_logs), ("no_monitor", True)):
                if hasattr(ray_params, name):
                    setattr(ray_params, name, value)
        super().__init__(ray_params, head=head, **options)

    def start_api_server(self, **_: Any) -> None:
        self._webui_url = ""
        namespace = ray_constants.KV_NAMESPACE_DASHBOARD
        gcs: Any = self.get_gcs_client()  # type: ignore[no-untyped-call]
        for key, value in (("webui:url", ""), (ray_constants.DASHBOARD_ADDRESS, NO_DASHBOARD)):
            gcs.internal_kv_put(key.encode(), value.encode(), True, namespace)

    def start_raylet(self, *args: Any, **options: Any) -> None:
        core: Any = _raylet
        names = [getattr(core, name, None) for name in PORTS]
        # An operator may want Ray's metrics, which the agent exports.
        if None in names or os.environ.get("RAY_enable_metrics_collection") != "0":
            super().start_raylet(*args, **options)
            return
        for name in names:
            core.persist_port(self._session_dir, self._node_id, name, NO_PORT)
        programs = _Programs(Path(self._session_dir), str(self._node_id), self.workers)
        with programs.in_place():
            super().start_raylet(*args, **options)


def start_ray(*, log_to_driver: bool, forks: WorkerForks | None = None, **options: Any) -> None:
    """``ray.init`` that starts a Ray of few processes, unless it finds one to join.

    Args:
        log_to_driver: what workers print comes to this program.
        forks: what its workers are forked of.
        options: others of ``ray.init``.
    """
    set_ray_environment()
    own = {"shows_logs": log_to_driver, "workers": None if forks is None else forks.path}
    with _made_by(type("_OwnNode", (_Node,), own)):
        ray.init(include_dashboard=False, log_to_driver=log_to_driver, **options)


@contextmanager
def _made_by(node: type[_Node]) -> Iterator[None]:
    """Has ``ray.init`` make its node of this class."""
    original = ray._private.node.Node
    ray._private.node.Node = node  # type: ignore[misc]
    try:
        yield
    finally:
        ray._private.node.Node = original  # type: ignore[misc]


class _Programs:
    """The programs of a raylet: its agents and its workers.

    Args:
        session: the folder of its session.
        node: its id.
        workers: path of the socket by which they come that are forked, if they are.
    """

    def __init__(self, session: Path, node: str, workers: str | None) -> None:
        bare = ["-I", "-S"]  # a Python without site-packages starts in a third of the time
        self._replaced = {"--dashboard_agent_command=": (AGENT, [_path(idle_agent)])}
        if workers is None:
            return
        if (name := getattr(_raylet, "RUNTIME_ENV_AGENT_PORT_NAME", None)) is not None:
            ours = [*bare, _path(late_agent), str(session / f"{name}_{node}"), RUNTIME_AGENT]
            self._replaced["--runtime_env_agent_command="] = (RUNTIME_AGENT, ours)
        ours = [*bare, _path(forked_worker), workers, str(FORK_ANSWER_SECONDS), WORKER]
        self._replaced[WORKERS] = (WORKER, ours)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has Ray start its raylet with these in place of its own."""
        original = services.start_ray_process

        def start(command: Sequence[str], *args: Any, **options: Any) -> Any:
            return original([self._changed(word) for word in command], *args, **options)

        services.start_ray_process = start
        try:
            yield
        finally:
            services.start_ray_process = original

    def _changed(self, word: str) -> str:
        """A raylet's flag that holds a command line, with another program; others as they are."""
        if WORKERS in self._replaced and word.startswith(AHEAD):
            return f"{AHEAD}0"
        for flag, (program, ours) in self._replaced.items():
            if word.startswith(flag):
                return word.replace(_quoted(program), _quoted(*ours))
        return word


def _path(module: ModuleType) -> str:
    return str(Path(str(module.__file__)).resolve())


def _quoted(*words: str) -> str:
    return subprocess.list2cmdline(words)

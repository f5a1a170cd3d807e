"""A Ray that Rayfin starts for itself: without the processes that serve only those who watch one.

``ray.init`` starts six processes beside the workers. Four of them do nothing for an engine: the
dashboard's, even where no dashboard is asked for (it would report usage statistics), the agent that
measures this node for it, the monitor of the autoscaler, which has no cloud here, and the monitor
of log files, which sends what workers print to a program that shows it. And ``ray.init`` waits for
the first two.

Ray has options against two of them (``ray start --include-log-monitor=false``), but not for
``ray.init``. So its ``Node`` is replaced while that runs. What a later Ray does otherwise stays as
it is.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray._private.node
from ray import _raylet
from ray._private import ray_constants, services

from rayfin.actors.processes import idle_agent
from rayfin.actors.processes.environment import set_ray_environment

NO_DASHBOARD = "127.0.0.1:0"
"""The dashboard's address: without one, Ray's agent looks for it every second, and logs that it is
not there."""

PORTS = ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME")
"""Ray's constants for the ports of an agent."""

NO_PORT = -1
"""What Ray's own agent reports for a port if it has not what it needs to serve it."""


class _Node(ray._private.node.Node):
    """A node; the head processes that it starts are the GCS and the raylet."""

    shows_logs = False

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
        with _idle_agent():
            super().start_raylet(*args, **options)


class _NodeWithLogs(_Node):
    shows_logs = True


def start_ray(*, log_to_driver: bool, **options: Any) -> None:
    """``ray.init`` that starts a Ray of few processes, unless it finds one to join.

    Args:
        log_to_driver: what workers print comes to this program.
        options: others of ``ray.init``.
    """
    set_ray_environment()
    with _made_by(_NodeWithLogs if log_to_driver else _Node):
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


@contextmanager
def _idle_agent() -> Iterator[None]:
    """Has Ray start its raylet with ``idle_agent.py`` in place of its own agent."""
    original = services.start_ray_process

    def start(command: Sequence[str], *args: Any, **options: Any) -> Any:
        return original([_with_idle_agent(word) for word in command], *args, **options)

    services.start_ray_process = start
    try:
        yield
    finally:
        services.start_ray_process = original


def _with_idle_agent(word: str) -> str:
    """The raylet's flag that holds the agent's command line, with another program; others as is."""
    if not word.startswith("--dashboard_agent_command="):
        return word
    agent = Path(services.RAY_PATH, "dashboard", "agent.py")
    return word.replace(_quoted(agent), _quoted(Path(idle_agent.__file__).resolve()))


def _quoted(path: Path) -> str:
    return subprocess.list2cmdline([str(path)])

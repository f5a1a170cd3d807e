"""A Ray that Rayfin starts for itself: without the processes that serve only those who watch one.

``ray.init`` starts six processes beside the workers. Three of them do nothing for an engine: the
dashboard's, even where no dashboard is asked for (it would report usage statistics), the monitor of
the autoscaler, which has no cloud here, and the monitor of log files, which sends what workers
print to a program that shows it. And ``ray.init`` waits for the first one.

Ray has options against two of them (``ray start --include-log-monitor=false``), but not for
``ray.init``. So its ``Node`` is replaced while that runs. What a later Ray does otherwise stays as
it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.node
from ray._private import ray_constants

from rayfin.actors.processes.environment import set_ray_environment

NO_DASHBOARD = "127.0.0.1:0"
"""The dashboard's address: without one, Ray's agent looks for it every second, and logs that it is
not there."""


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

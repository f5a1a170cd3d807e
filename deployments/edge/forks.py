"""The workers of a server's own Ray: forks of a process that has imported what they need.

Imports nothing that takes time: ``rayfin serve`` starts that process before it imports Ray.
"""

import os
import sys

from rayfin.actors.processes.environment import set_ray_environment
from rayfin.actors.processes.worker_forks import WorkerForks
from rayfin.deployments.edge.listen_options import CALLBACK, CALLBACK_PATH, ListenOptions

PRELOADED = (
    "ray.serve._private.controller",
    "ray.serve._private.proxy",
    "ray.serve._private.replica",
    "rayfin.actors.scheduler.actor",
    "rayfin.actors.runner.actor",
    "rayfin.deployments.edge.proxy",
    "rayfin.deployments.serve.engine",
    "rayfin.deployments.serve.model_service",
    "rayfin.deployments.serve.ingress",
    "rayfin.deployments.api.app",
)
"""What the processes of a server import, without torch."""


VARIABLE = "RAYFIN_FORKED_WORKERS"
"""0: each worker of Ray starts as ever, and imports for itself."""


def server_forks(listen_options: ListenOptions) -> WorkerForks | None:
    """Sets the environment of a server's workers, and starts the process that they are forked of.

    Returns:
        None if VARIABLE asks for no forks, where there may be a Ray already, and not on Linux.
    """
    set_ray_environment()
    listen_options.tell_proxies()
    os.environ.setdefault(CALLBACK, CALLBACK_PATH)
    if os.environ.get(VARIABLE) == "0" or "RAY_ADDRESS" in os.environ or sys.platform != "linux":
        return None
    return WorkerForks(PRELOADED)

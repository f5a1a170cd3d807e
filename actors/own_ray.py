"""What the processes of a Ray that we start ourselves find in their environment.

Elsewhere an operator says so: k8s/base/rayservice.yaml does.
"""

import os

ENVIRONMENT = {
    # Ray gives every worker nice 15, below all else on the machine.
    "RAY_worker_niceness": "0",
    # malloc keeps megabytes for each arena in which a thread has been, 8 a core, and Ray's
    # processes have dozens of threads: without this they still grew after half an hour.
    "MALLOC_ARENA_MAX": "2",
}


def prepare_own_ray() -> None:
    """Before ``ray.init`` starts a Ray. What the environment says already stands."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

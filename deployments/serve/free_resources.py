"""Whether the cluster has room for more engines."""

from dataclasses import replace

import ray
from ray import serve

from rayfin.actors.config import EngineArgs
from rayfin.actors.supervision.placement import bundles, pick_cluster_device


def has_room(args: EngineArgs, deployment: str, wanted: int) -> bool:
    """Whether an update of a deployment may start an engine before an old one goes.

    That needs room for one engine beside the running ones, and for each one that they are fewer
    than ``wanted``: Serve starts those together, and stops no old engine until all are ready. True
    where there is no cluster.

    By sums over all nodes. Where the free devices of a model's group lie on different nodes the
    answer is wrong, and an engine that is started waits for its place.
    """
    if not ray.is_initialized():
        return True
    needed = bundles(replace(args, device=pick_cluster_device(args.device)))
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    engines = max(wanted - running_engines(deployment), 0) + 1
    return all(
        free.get(kind, 0.0) >= engines * sum(each[kind] for each in needed) for kind in needed[0]
    )


def running_engines(deployment: str) -> int:
    """The engines of a deployment; the fewest where several applications have one of its name.

    An application does not know its own name while it is built.
    """
    numbers = [
        own.deployments[deployment].replica_states.get("RUNNING", 0)  # type: ignore[call-overload]
        for own in serve.status().applications.values()
        if deployment in own.deployments
    ]
    return min(numbers, default=0)

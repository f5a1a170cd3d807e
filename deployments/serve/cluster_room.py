"""Whether the cluster has room for one engine more."""

from dataclasses import replace

import ray

from rayfin.actors.config import EngineArgs
from rayfin.actors.supervision.placement import bundles, pick_cluster_device


def has_room(args: EngineArgs) -> bool:
    """Whether an engine could be placed now, beside all that runs; yes where there is no cluster.

    By sums over all nodes. Where the free devices of a model's group lie on different nodes the
    answer is wrong, and an engine that is started waits for its place.
    """
    if not ray.is_initialized():
        return True
    needed = bundles(replace(args, device=pick_cluster_device(args.device)))
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return all(free.get(kind, 0.0) >= sum(each[kind] for each in needed) for kind in needed[0])

"""What an engine asks of the cluster: a device, bundles of resources, and a scheduler actor."""

from typing import Any

import ray

from rayfin.actors.config import EngineArgs
from rayfin.actors.processes.registry import NAMESPACE
from rayfin.actors.scheduler.actor import SchedulerActor


def bundles(args: EngineArgs) -> list[dict[str, float]]:
    """The placement group's bundles, one for each stage; ``args.device`` is not "auto".

    A bundle lies on one node, so the ranks of a stage are together.
    """
    place, ranks = args.place, args.tensor_parallel_size
    each = {"CPU": place.cpus, **place.resources}
    if args.device == "cuda":
        each["GPU"] = place.gpus
    bundle = {name: amount * ranks for name, amount in each.items() if amount}
    return [bundle] * args.pipeline_parallel_size


def pick_cluster_device(device: str) -> Any:
    """Resolves "auto": a GPU if the cluster has one. The supervisor's own node may have none."""
    if device != "auto":
        return device
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return "cuda" if resources.get("GPU", 0) else "cpu"


def create_scheduler(name: str, detached: bool, ahead: EngineArgs | None = None) -> Any:
    """Creates the scheduler actor of the engine ``name``.

    ``ahead`` are its settings where its supervisor is yet to come.

    Raises:
        ValueError: the name is taken.
    """
    actor_class: Any = SchedulerActor  # Ray's stubs lose `options` on a decorated class
    options = {"name": name, "namespace": NAMESPACE}
    if detached:
        options["lifetime"] = "detached"
    return actor_class.options(**options).remote(name, ahead=ahead)

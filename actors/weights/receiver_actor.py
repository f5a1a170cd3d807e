"""``WeightReceiver`` as an actor: the calls of all ingresses reach the one that has the group."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfin.actors.processes.registry import NAMESPACE
from rayfin.actors.weights.coordinator_actor import store_here

SUFFIX = "-receiver"


@ray.remote(num_cpus=0, max_restarts=0)
class WeightReceiverActor:
    """A ``WeightReceiver`` in a process of its own. Another one begins where this has ended."""

    def __init__(self, weight_dir: str | None, engine: str) -> None:
        from rayfin.actors.weights.receiver import WeightReceiver  # imports torch

        self._receiver = WeightReceiver(store_here(weight_dir, engine))
        self._receiver.watch()

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the receiver."""
        return getattr(self._receiver, method)(*arguments)


def start_receiver(weight_dir: str | None, engine: str) -> Any:
    """The receiver of an engine's deployment, which is started on this node if there is none."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_class: Any = WeightReceiverActor  # Ray's stubs lose `options` on a decorated class
    return actor_class.options(
        name=engine.rpartition("/")[0] + SUFFIX,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=here,
    ).remote(weight_dir, engine)

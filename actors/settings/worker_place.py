"""Where an engine's workers lie on a cluster: the setting ``placement``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from rayfin.actors.errors import InvalidConfig

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
NAME = "placement"


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What each worker of an engine asks of its node, and how stages lie."""

    cpus: float = 1.0
    gpus: float = 1.0  # on a GPU: a share of it, or whole ones
    strategy: Strategy = "PACK"  # of the stages; the ranks of a stage share a node
    resources: Mapping[str, float] = field(default_factory=dict)  # Ray's, by name


USUAL = WorkerPlace()


def read_place(given: Mapping[str, Any] | None) -> WorkerPlace:
    """Reads the setting; None is as usual: a core, or a core and a GPU.

    Raises:
        InvalidConfig: a field or value that is none.
    """
    if given is None:
        return USUAL
    known = [own.name for own in fields(WorkerPlace)]
    if not isinstance(given, Mapping) or given.keys() - set(known):
        raise InvalidConfig(f"{NAME} is an object of {', '.join(known)}; got {given!r}", NAME)
    place = WorkerPlace(**given)
    if place.strategy not in get_args(Strategy):
        raise InvalidConfig(f"{NAME}: strategy must be one of {get_args(Strategy)}", NAME)
    amounts = {"cpus": place.cpus, "gpus": place.gpus}
    if not isinstance(place.resources, Mapping):
        raise InvalidConfig(f"{NAME}: resources must be an object", NAME)
    for name, amount in (amounts | dict(place.resources)).items():
        if not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise InvalidConfig(f"{NAME}: {name} must be at least 0, got {amount!r}", NAME)
    if place.gpus > 1 and place.gpus % 1:
        raise InvalidConfig(f"{NAME}: gpus is a share of one, or whole ones", NAME)
    if not place.gpus or not (place.cpus or place.resources or "gpus" in given):
        raise InvalidConfig(f"{NAME}: a worker needs some of its device", NAME)
    return place

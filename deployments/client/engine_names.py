"""How engines are called in Ray's actor registry, and how an ingress finds them."""

from contextlib import suppress
from typing import Any

import ray

from rayfin.actors.processes.registry import NAMESPACE, engine_names

ENGINE = "engine"
"""The Serve deployment of the engines of an application's one model; of several, a name follows."""

PREFILL = "prefill-"
"""What the last part of the name of an engine begins with that computes long prompts for others."""

INGRESS = "ingress"
"""The Serve deployment of an application's ingresses."""


def engine_prefix(app: str, deployment: str = ENGINE) -> str:
    """What the names of all engines of a Serve deployment begin with; a number follows."""
    return f"{app}/{deployment}/"


def is_prefill(name: str) -> bool:
    """Whether an engine, by its name, is one of ``--prefill-engines``."""
    return name.rpartition("/")[2].startswith(PREFILL)


def find_engines(app: str, deployment: str = ENGINE) -> dict[str, Any]:
    """The handles of the deployment's schedulers, by name."""
    handles: dict[str, Any] = {}
    for name in engine_names(engine_prefix(app, deployment)):
        with suppress(ValueError):  # only its runners live, or it died between the two calls
            handles[name] = ray.get_actor(name, namespace=NAMESPACE)
    return handles


def find_engine(app: str, deployment: str = ENGINE) -> Any | None:
    """One of them, None while there is none."""
    return next(iter(find_engines(app, deployment).values()), None)

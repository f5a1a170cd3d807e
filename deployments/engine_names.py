"""How engines are called in Ray's actor registry, and how an ingress finds them."""

from contextlib import suppress
from typing import Any

import ray

from rayfin.actors.group import NAMESPACE
from rayfin.actors.supervisor import engine_names


def engine_prefix(app: str) -> str:
    """What the names of all engines of a Serve application begin with; a number follows."""
    return f"{app}/engine/"


def find_engines(app: str) -> dict[str, Any]:
    """The handles of the application's schedulers, by name."""
    found: dict[str, Any] = {}
    for name in engine_names(engine_prefix(app)):
        with suppress(ValueError):  # only its runners live, or it died between the two calls
            found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


def find_engine(app: str) -> Any | None:
    """One of them, None while there is none."""
    return next(iter(find_engines(app).values()), None)

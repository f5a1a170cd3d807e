"""How engines are called in Ray's actor registry, and how an ingress finds them."""

from contextlib import suppress
from typing import Any

import ray
from ray.util import list_named_actors

from rayfin.actors.supervisor import NAMESPACE


def engine_name(app: str, replica: str) -> str:
    """The name of the scheduler actor of one engine replica of a Serve application."""
    return f"{_prefix(app)}{replica}"


def find_engines(app: str) -> dict[str, Any]:
    """The handles of the application's schedulers, by name."""
    found: dict[str, Any] = {}
    for actor in list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(_prefix(app)):
            with suppress(ValueError):  # it died between the two calls
                found[name] = ray.get_actor(name, namespace=NAMESPACE)
    return found


def find_engine(app: str) -> Any | None:
    """One of them, None while there is none."""
    return next(iter(find_engines(app).values()), None)


def _prefix(app: str) -> str:
    return f"{app}/engine/"

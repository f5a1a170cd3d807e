"""How engines are called in Ray's actor registry, and how an ingress finds one."""

from typing import Any

import ray
from ray.util import list_named_actors

from rayfin.actors.supervisor import NAMESPACE


def engine_name(app: str, replica: str) -> str:
    """The name of the scheduler actor of one engine replica of a Serve application."""
    return f"{_prefix(app)}{replica}"


def find_engine(app: str) -> Any | None:
    """The scheduler's handle of an engine of the application, None while there is none."""
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(_prefix(app)):
            try:
                return ray.get_actor(actor["name"], namespace=NAMESPACE)
            except ValueError:  # it died between the two calls
                continue
    return None


def _prefix(app: str) -> str:
    return f"{app}/engine/"

"""Rayfin's actors in Ray's registry: names, handles, and how they are ended."""

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
)

from rayfin.actors.errors import (
    RunnerGroupFailed,
)
from rayfin.actors.processes.identity import Process, end
from rayfin.actors.timing import NAME_POLL_SECONDS, PROCESS_GONE_SECONDS

logger = logging.getLogger(__name__)

NAMESPACE = "rayfin"
"""Ray namespace of scheduler and runner actors."""


def runner_name(engine: str, rank: int = 0) -> str:
    """Returns the name of an engine's runner."""
    return f"{engine}/runner/{rank}"


def when_name_is_free(create: Callable[[], Any]) -> Any:
    """Calls ``create`` until the name is free: a dead actor keeps its name for a moment.

    Raises:
        RunnerGroupFailed: another actor keeps the name.
    """
    deadline = time.monotonic() + PROCESS_GONE_SECONDS
    while True:
        try:
            return create()
        except ValueError as error:
            if time.monotonic() > deadline:
                raise RunnerGroupFailed(str(error)) from error
            time.sleep(NAME_POLL_SECONDS)


def end_process(process: Process) -> bool:
    """Kills a process on any node. Returns True once it or its node is gone."""
    if process.node == ray.get_runtime_context().get_node_id():
        return end(process)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    if process.node not in alive:
        return True
    there = NodeAffinitySchedulingStrategy(process.node, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(end)
    try:
        gone: bool = ray.get(
            task.options(scheduling_strategy=there).remote(process), timeout=PROCESS_GONE_SECONDS
        )
    except RayError as error:
        logger.error("cannot end %s: %s", process, error)
        return False
    return gone


def describe(error: RayError) -> str:
    """Returns the error's cause in one line."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    first_line = next(iter(str(cause).strip().splitlines()), "")
    return f"{type(cause).__name__}: {first_line}"


def engine_names(prefix: str) -> list[str]:
    """Returns the engines with this prefix of which a scheduler or a runner is registered."""
    actors = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted({name.partition("/runner/")[0] for name in names if name.startswith(prefix)})


def find_actor(name: str) -> Any | None:
    """Returns the handle of a named actor, or None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def kill_named(name: str) -> None:
    if (actor := find_actor(name)) is not None:
        ray.kill(actor)

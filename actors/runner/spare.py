"""What makes a spare runner: a process that does ahead what a runner does before it can load.

Most of a small model's start is imports. Which modules a model needs depends on its kind, so a
spare is given the list of those that its engine's runner has imported. Where loading only maps
packed weights (``--weights-cache``), whose memory processes share, it loads ahead as well.
"""

import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rayfin.actors.config import EngineArgs, EngineConfig
from rayfin.actors.processes.environment import at_low_priority
from rayfin.actors.processes.host_memory import free_bytes
from rayfin.actors.processes.identity import Process
from rayfin.actors.settings.spare_runners import spares_that_fit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerState:
    """A runner's answer to a ping."""

    process: Process
    serves: bool  # it has pages; False of a spare, and of a runner that loads


@dataclass(frozen=True, slots=True)
class SparePlan:
    """What a runner says of the spares of its engine."""

    count: int  # that may be
    modules: tuple[str, ...] = ()  # that it has imported, in this order


def plan_spares(args: EngineArgs, config: EngineConfig, grown: int, *, served: bool) -> SparePlan:
    """What spares a runner may have beside it, by the memory of its machine.

    Args:
        grown: bytes by which this process has grown since its pages were allocated.
        served: whether the engine outlives the process that started it.
    """
    pages_to_come = max(config.num_pages * config.page_bytes - grown, 0)
    device = "cuda" if args.device == "cuda" else "cpu"
    free = free_bytes() - pages_to_come
    count = spares_that_fit(args.spare_runners, free, served=served, device=device)
    return SparePlan(count, tuple(sys.modules) if count else ())


def import_modules(names: Sequence[str]) -> None:
    """Imports modules by name, behind all else on the machine; returns when they are there.

    A name that cannot be imported (one that another module has made) is left out.
    """

    def import_all() -> None:
        for name in names:
            if name not in sys.modules:
                _try_import(name)

    at_low_priority(import_all)


def maps_weights(args: EngineArgs) -> bool:
    """Whether loading would map packed weights, and take no memory of its own for them.

    Raises:
        InvalidConfig, UnsupportedModel: the model cannot be served.
    """
    if args.weights_folder is None or (args.speculation and args.speculation.one_device):
        return False
    # Here, for they import torch, and this module is part of the scheduler's process.
    from rayfin.actors.model_files.pooling_folder import read_recipe
    from rayfin.actors.runner.loading import holds_weights

    return read_recipe(args) is None and holds_weights(args)


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        logger.debug("a spare runner does not import %s: %s", name, error)

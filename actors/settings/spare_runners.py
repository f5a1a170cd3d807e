"""How many spare runners an engine keeps: processes that take over from one that dies."""

from typing import Protocol

from rayfin.actors.errors import InvalidConfig

DEFAULT_SPARES = 1
SPARE_BYTES = 512 << 20
"""More than the memory of its own of a spare runner's process (docs/reliability.md)."""

LEFT_BYTES = 2 << 30
"""Memory that stays free beside a spare runner where none is asked for."""


class SpareSettings(Protocol):
    """The part of ``EngineArgs`` that is about it."""

    @property
    def spare_runners(self) -> int | None: ...

    @property
    def tensor_parallel_size(self) -> int: ...

    @property
    def pipeline_parallel_size(self) -> int: ...


def require_spares(args: SpareSettings) -> None:
    """Refuses spare runners that are asked for where they cannot take over.

    Raises:
        InvalidConfig: several devices share the model, or their number is negative.
    """
    asked = args.spare_runners
    if asked is not None and asked < 0:
        raise InvalidConfig(f"spare_runners must be at least 0, got {asked}", "spare_runners")
    if asked and not most_spares(args):
        raise InvalidConfig(
            "spare_runners are for one device, not for several that share a model", "spare_runners"
        )


def most_spares(args: SpareSettings) -> int:
    """The most spare runners that an engine of these settings has; memory may allow fewer."""
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        return 0
    return DEFAULT_SPARES if args.spare_runners is None else args.spare_runners


def seats(args: SpareSettings) -> int:
    """The number of names of an engine's runners: one of each rank, then those of spares.

    A runner keeps its name for life. So an engine of one rank may have its runner at any of them.
    """
    return args.tensor_parallel_size * args.pipeline_parallel_size + most_spares(args)


def spares_that_fit(asked: int | None, free: int, *, served: bool, device: str) -> int:
    """The spare runners of an engine of one rank.

    Args:
        asked: the setting, which is obeyed on a CPU; None: one, if memory allows and it is served.
        free: bytes of memory that neither others nor this engine's own pages will take.
        served: whether the engine outlives the process that started it.
        device: "cpu" or "cuda"; a GPU's runner needs the GPU, which the one before it has.
    """
    if device != "cpu":
        return 0
    if asked is not None:
        return asked
    return DEFAULT_SPARES if served and free >= LEFT_BYTES + SPARE_BYTES else 0

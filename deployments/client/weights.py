"""New weights for the engines of a deployment: from a trainer's tensors to a coordinator's call."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rayfin.actors.errors import EngineUnavailable, InvalidRequest, RayfinError
from rayfin.actors.timing import WEIGHTS_CALL_SECONDS, WEIGHTS_PAUSE_SECONDS
from rayfin.actors.weights.sources import folder_version
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.version import (
    EngineWeights,
    KeptPages,
    NewRequests,
    PauseMode,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch

    Weights = str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

DTYPES = ("bfloat16", "float16", "float32")
CHUNK_BYTES = 256 << 20
"""Of a file that goes to other nodes, in one object."""


class WeightsClient(Protocol):
    """Updates and pauses of one model's engines."""

    async def update(
        self,
        weights: "Weights",
        version: str = "",
        *,
        mode: PauseMode = "keep",
        kv: KeptPages = "recompute",
        new: NewRequests = "wait",
        partial: bool = False,
        dtype: str | None = None,
    ) -> dict[str, Any]:
        """Makes all engines serve other weights, or none.

        Args:
            weights: a folder or file of safetensors that every node sees, or tensors by name.
            version: its name; its number if empty.
            mode: what running requests do: "keep" freezes them, and they go on with the new
                weights; "wait" lets them finish before; "abort" ends them.
            kv: their keys and values are computed again, or kept as they are.
            new: requests that come meanwhile wait, or are refused.
            partial: tensors that are left out stay as they are.
            dtype: tensors are rounded to it.

        Returns:
            serial, version, digest, engines, how, kept, seconds, pause_seconds.

        Raises:
            InvalidRequest: they are not those of the model; nothing has changed.
            EngineBusy: another update is amid.
            StorageFull: there is no room for them.
            EngineUnavailable: there is no engine.
        """
        ...

    async def pause(
        self,
        mode: PauseMode = "keep",
        new: NewRequests = "wait",
        seconds: float = WEIGHTS_PAUSE_SECONDS,
    ) -> None:
        """Pauses all engines until ``resume``, or for so many seconds."""
        ...

    async def resume(self) -> None:
        """Ends a pause."""
        ...

    async def states(self) -> dict[str, EngineWeights]:
        """What each engine says of its weights, by its name."""
        ...


def write_version(
    store: WeightStore,
    weights: "Weights",
    label: str,
    base: Iterable[Path] | None,
    *,
    partial: bool = False,
    dtype: str | None = None,
) -> WeightVersion:
    """Writes a version into a store, unless it is a folder that can stay where it is.

    Args:
        base: files of the model's own weights; None where they are not known.
        partial: tensors that are left out stay as they are.
        dtype: tensors are rounded to it.

    Raises:
        InvalidRequest: they cannot be read, or a setting has no meaning.
        StorageFull: there is no room.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}", "dtype")
    if isinstance(weights, str | Path) and not partial and dtype is None:
        return folder_version(str(weights), label)
    import torch

    from rayfin.actors.weights.tensors import read_tensors, tensors_version

    rest: list[Path] = []
    if partial:
        current = store.current
        if current.is_base and base is None:
            raise InvalidRequest("partial: the model's own tensors are not known here", "partial")
        rest = list(base or ()) if current.is_base else current.files
    if isinstance(weights, str | Path):
        weights = read_tensors(folder_version(str(weights)).files)
    rounded = None if dtype is None else getattr(torch, dtype)
    return tensors_version(store, weights, label, dtype=rounded, rest=rest)


class RemoteWeights:
    """The engines of a Serve deployment, by their coordinator.

    Args:
        weight_dir: the deployment's setting.
        base: files of the model's own weights; None where they are not known.
    """

    def __init__(
        self,
        app: str,
        deployment: str,
        weight_dir: str | None = None,
        base: Iterable[Path] | None = None,
    ) -> None:
        self._app, self._deployment = app, deployment
        self._weight_dir, self._base = weight_dir, base

    async def update(
        self,
        weights: "Weights",
        version: str = "",
        *,
        mode: PauseMode = "keep",
        kv: KeptPages = "recompute",
        new: NewRequests = "wait",
        partial: bool = False,
        dtype: str | None = None,
    ) -> dict[str, Any]:
        """See ``WeightsClient``."""
        from rayfin.actors.weights.coordinator_actor import store_here  # imports Ray

        engine = f"{self._app}/{self._deployment}/"
        store = await asyncio.to_thread(store_here, self._weight_dir, engine)
        made = await asyncio.to_thread(
            write_version, store, weights, version, self._base, partial=partial, dtype=dtype
        )
        here = Path(made.place).parent == store.folder
        options = {"mode": mode, "pages": kv, "new": new}
        try:
            chunks = await asyncio.to_thread(_chunks, made) if here else []
            report: dict[str, Any] = await self._call("update", made, chunks, options)
            return report
        finally:
            known = [own.digest for own in (store.current, store.proposed) if own is not None]
            if here and made.digest not in known:
                Path(made.place).unlink(missing_ok=True)

    async def pause(
        self,
        mode: PauseMode = "keep",
        new: NewRequests = "wait",
        seconds: float = WEIGHTS_PAUSE_SECONDS,
    ) -> None:
        """See ``WeightsClient``."""
        await self._call("pause", {"mode": mode, "new": new, "seconds": seconds})

    async def resume(self) -> None:
        """See ``WeightsClient``."""
        await self._call("resume")

    async def states(self) -> dict[str, EngineWeights]:
        """See ``WeightsClient``."""
        states: dict[str, EngineWeights] = await self._call("states")
        return states

    async def _call(self, method: str, *arguments: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        from rayfin.actors.weights.coordinator_actor import SUFFIX, start_coordinator

        name = f"{self._app}/{self._deployment}{SUFFIX}"
        try:
            actor = await asyncio.to_thread(start_coordinator, name)
            async with asyncio.timeout(WEIGHTS_CALL_SECONDS):
                return await getattr(actor, method).remote(*arguments)
        except RayTaskError as error:
            if isinstance(error.cause, RayfinError):
                raise error.cause from None
            raise EngineUnavailable(f"the update of weights failed: {error.cause}") from error
        except (RayError, TimeoutError, ValueError) as error:
            raise EngineUnavailable("the coordinator of weights does not answer") from error


def _chunks(version: WeightVersion) -> list[Any]:
    """The file of a version as objects of Ray, where other nodes may want them."""
    import ray

    nodes: list[Any] = ray.nodes()  # type: ignore[no-untyped-call]
    if sum(bool(node["Alive"]) for node in nodes) < 2:
        return []
    import numpy as np

    whole = np.memmap(version.place, np.uint8, "r")
    return [ray.put(whole[at : at + CHUNK_BYTES]) for at in range(0, len(whole), CHUNK_BYTES)]


def states_as_json(states: Mapping[str, EngineWeights]) -> dict[str, Any]:
    """What engines say, and what they agree on: the version of most, and who is behind."""
    newest = max(
        (own.version for own in states.values()),
        key=lambda own: own.serial,
        default=WeightVersion(),
    )
    behind = [name for name, own in states.items() if own.version.serial < newest.serial]
    return {
        "serial": newest.serial,
        "version": newest.label,
        "digest": newest.digest,
        "behind": sorted(behind),
        "paused": bool(states) and all(own.paused for own in states.values()),
        "engines": {name: asdict(own) for name, own in sorted(states.items())},
    }

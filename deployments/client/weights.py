"""New weights for the engines of a deployment: from a trainer's tensors to a coordinator's call."""

import asyncio
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_type_hints

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidRequest, RayfinError
from rayfin.actors.messages import Command
from rayfin.actors.processes.environment import at_low_priority
from rayfin.actors.timing import WEIGHTS_CALL_SECONDS, WEIGHTS_PAUSE_SECONDS
from rayfin.actors.weights.begun import BegunUpdate
from rayfin.actors.weights.drafts import DraftNames
from rayfin.actors.weights.sources import base_files, folder_version
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.version import (
    EngineOrder,
    EngineWeights,
    KeptPages,
    NewRequests,
    PauseMode,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch

    Weights = str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None
    """Of an update; None: what ``WeightsClient.receive`` got before."""


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How weights change.

    Raises:
        InvalidRequest: a value has no meaning; ``param`` names the field.
    """

    mode: PauseMode = "keep"
    """What running requests do: "keep" freezes them, and they go on with the new weights; "wait"
    lets them finish before; "abort" ends them."""

    kv: KeptPages = "recompute"  # their keys and values are computed again, or kept as they are
    new: NewRequests = "wait"  # requests that come meanwhile wait, or are refused
    partial: bool = False  # tensors that are left out stay as they are
    dtype: Literal["bfloat16", "float16", "float32"] | None = None  # tensors are rounded to it
    order: EngineOrder = "together"  # all engines pause, or one after the other
    target: Literal["model", "draft"] = "model"  # whose tensors come: of what drafts, by its names
    timeout: float | None = None  # seconds until it is decided; else all stays as it is

    def __post_init__(self) -> None:
        seconds, longest = self.timeout, WEIGHTS_CALL_SECONDS
        is_number = isinstance(seconds, int | float)
        if seconds is not None and not (is_number and 0 < seconds <= longest):
            raise InvalidRequest(f"timeout must be over 0 and at most {longest:.0f} s", "timeout")
        for name, kind in get_type_hints(UpdateOptions).items():
            if name == "timeout":
                continue
            setting, known = getattr(self, name), [*_values(kind)]
            if not any(
                setting is value or (setting == value and type(setting) is str) for value in known
            ):
                shown = ", ".join(str(value) for value in known if value is not None)
                raise InvalidRequest(f"{name} must be one of {shown}, got {setting!r}"[:256], name)


def _values(kind: Any) -> Iterator[Any]:
    """The values of a type that has few."""
    if kind in (bool, NoneType):
        yield from (False, True) if kind is bool else (None,)
        return
    for member in get_args(kind):
        yield from [member] if isinstance(member, str) else _values(member)


DEFAULTS = UpdateOptions()


class WeightsClient(Protocol):
    """Updates and pauses of one model's engines."""

    async def update(
        self, weights: "Weights", version: str = "", options: UpdateOptions = DEFAULTS
    ) -> dict[str, Any]:
        """Makes all engines serve other weights, or none.

        Args:
            weights: a folder or file of safetensors that every node sees, tensors by name, refs of
                ``rayfin.rollouts.put``, or None: what ``receive`` got.
            version: its name; its number if empty.

        Returns:
            serial, version, digest, engines, how, kept, seconds, pause_seconds.

        Raises:
            InvalidRequest: they are not those of the model; nothing has changed.
            EngineBusy: another update is amid.
            StorageFull: there is no room for them.
            EngineUnavailable: there is no engine.
        """
        ...

    async def receive(self, body: AsyncIterable[bytes], version: str) -> WeightVersion:
        """Begins an update by the bytes of a safetensors file; nothing else has changed.

        Raises:
            InvalidRequest: they are no such file.
            EngineBusy: an update is begun.
            StorageFull: there is no room for them.
        """
        ...

    async def abandon(self) -> None:
        """Ends the update that is begun, or amid and not decided."""
        ...

    async def ask_receiver(self, method: str, *arguments: Any) -> Any:
        """Calls ``join``, ``begin``, ``receive``, ``finish`` or ``leave`` of ``WeightReceiver``.

        Raises:
            RayfinError: as the method.
            InvalidRequest: these engines are no actors, and there is none.
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

    async def rename(self, version: str) -> dict[str, Any]:
        """Gives the weights that are served another name, by an update to the same tensors."""
        ...

    async def numbers(self, name: str, count: int) -> list[Any]:
        """The first ``count`` rows of a tensor of the weights that are served.

        Raises:
            InvalidRequest: there is no such tensor.
        """
        ...


def write_version(
    store: WeightStore,
    weights: "Weights",
    label: str,
    args: EngineArgs,
    options: UpdateOptions = DEFAULTS,
) -> WeightVersion:
    """Writes a version into a store, unless it is a folder that can stay where it is.

    Args:
        args: of the engines.

    Raises:
        InvalidRequest: they cannot be read.
        StorageFull: there is no room.
    """
    partial, dtype, current = options.partial, options.dtype, store.current
    draft = options.target == "draft"
    names = DraftNames(args, draft=draft)
    version: WeightVersion | None = None
    if weights is None:
        version = BegunUpdate(store).of(label)
        weights = version.place
    elif isinstance(weights, str | Path):
        version = folder_version(str(weights), label, store)
    if version is not None:
        label = label or version.label
        beside = names.apart and (
            names.among(version.files) or not current.is_base and names.among(current.files)
        )
        if not (partial or dtype or draft or beside):
            return version
    import torch

    from rayfin.actors.weights.tensors import read_tensors, tensors_version

    tensors: Any = weights if version is None else read_tensors(version.files)
    if not isinstance(tensors, Mapping):
        tensors = _opened(tensors)
    return tensors_version(
        store,
        tensors,
        label,
        dtype=None if dtype is None else getattr(torch, dtype),
        names=names if names.apart else None,
        rest=(base_files(args) if current.is_base else current.files)
        if partial or names.apart
        else (),
        partial=partial,
    )


def _opened(items: Iterable[Any]) -> Iterator[Any]:
    """Named tensors; in place of refs of Ray's those of their buckets."""
    for item in items:
        if isinstance(item, tuple | list):
            yield item
            continue
        from rayfin.actors.weights.buckets import opened  # imports Ray

        yield from opened([item])


def served_place(store: WeightStore, args: EngineArgs) -> str:
    """The file or folder with the weights that are served.

    Raises:
        InvalidRequest: the model's own weights are no files.
    """
    current = store.current
    if not current.is_base:
        return current.place
    files = base_files(args)
    if not files:
        raise InvalidRequest("the model's own weights are no safetensors files", "model")
    return str(files[0].parent)


def read_numbers(store: WeightStore, args: EngineArgs, name: str, count: int) -> list[Any]:
    """See ``WeightsClient.numbers``."""
    from rayfin.actors.weights.tensors import read_tensors

    files = WeightVersion(place=served_place(store, args)).files
    for _, tensor in read_tensors(files, lambda key: key == name):
        rows: list[Any] = tensor[:count].float().tolist() if tensor.ndim else [float(tensor)]
        return rows
    raise InvalidRequest(f"the model has no {name}", "name")


class RemoteWeights:
    """The engines of a Serve deployment, by their coordinator.

    Args:
        args: of the engines.
    """

    def __init__(self, app: str, deployment: str, args: EngineArgs) -> None:
        self._app, self._deployment, self._args = app, deployment, args

    async def update(
        self, weights: "Weights", version: str = "", options: UpdateOptions = DEFAULTS
    ) -> dict[str, Any]:
        """See ``WeightsClient``."""
        store = await self._store()
        with BegunUpdate(store).ended() if weights is None else nullcontext():
            return await self._update(store, weights, version, options)

    async def _update(
        self, store: WeightStore, weights: "Weights", version: str, options: UpdateOptions
    ) -> dict[str, Any]:
        write = partial(write_version, store, weights, version, self._args, options)
        weight_version = await asyncio.to_thread(at_low_priority, write)
        here = Path(weight_version.place).parent == store.folder
        orders: dict[str, Any] = {"mode": options.mode, "pages": options.kv}
        orders |= {"new": options.new, "order": options.order, "timeout": options.timeout}
        try:
            chunks = await asyncio.to_thread(_chunks, weight_version) if here else []
            report: dict[str, Any] = await self._call("update", weight_version, chunks, orders)
            return report
        finally:
            if here and weight_version.digest not in store.digests:
                Path(weight_version.place).unlink(missing_ok=True)

    async def receive(self, body: AsyncIterable[bytes], version: str) -> WeightVersion:
        """See ``WeightsClient``."""
        return await BegunUpdate(await self._store()).receive(body, version)

    async def abandon(self) -> None:
        """See ``WeightsClient``."""
        BegunUpdate(await self._store()).abandon()
        await self._call("abandon")

    async def ask_receiver(self, method: str, *arguments: Any) -> Any:
        """See ``WeightsClient``."""
        from rayfin.actors.weights.coordinator_actor import start_receiver

        start = partial(start_receiver, self._args.weight_dir, f"{self._app}/{self._deployment}/")
        return await _call(start, "call", method, *arguments)

    async def _store(self) -> WeightStore:
        from rayfin.actors.weights.coordinator_actor import store_here  # imports Ray

        engine = f"{self._app}/{self._deployment}/"
        return await asyncio.to_thread(store_here, self._args.weight_dir, engine)

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

    async def rename(self, version: str) -> dict[str, Any]:
        """See ``WeightsClient``."""
        return await self.update(served_place(await self._store(), self._args), version)

    async def numbers(self, name: str, count: int) -> list[Any]:
        """See ``WeightsClient``."""
        return await asyncio.to_thread(read_numbers, await self._store(), self._args, name, count)

    async def _call(self, method: str, *arguments: Any) -> Any:
        from rayfin.actors.weights.coordinator_actor import SUFFIX, start_coordinator

        name = f"{self._app}/{self._deployment}{SUFFIX}"
        return await _call(partial(start_coordinator, name), method, *arguments)


async def _call(start: Callable[[], Any], method: str, *arguments: Any) -> Any:
    from ray.exceptions import RayError, RayTaskError

    try:
        actor = await asyncio.to_thread(start)
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

    from rayfin.actors.weights.coordinator_actor import chunks_of

    nodes: list[Any] = ray.nodes()  # type: ignore[no-untyped-call]
    return chunks_of(version) if sum(bool(node["Alive"]) for node in nodes) > 1 else []


def states_as_json(states: Mapping[str, EngineWeights]) -> dict[str, Any]:
    """What engines say, and what they agree on: the version of most, and who is behind."""
    newest = max(
        (engine.version for engine in states.values()),
        key=lambda engine: engine.serial,
        default=WeightVersion(),
    )
    behind = [name for name, engine in states.items() if engine.version.serial < newest.serial]
    return {
        "serial": newest.serial,
        "version": newest.label,
        "digest": newest.digest,
        "behind": sorted(behind),
        "paused": bool(states) and all(engine.paused for engine in states.values()),
        "engines": {name: asdict(engine) for name, engine in sorted(states.items())},
    }


def sleep_command(level: object) -> Command:
    """The command of a level of vLLM's ``sleep``.

    0 keeps all memory there, and 1 the weights; here both keep the weights. 2 drops them: those
    that the engine serves are loaded when it wakes.

    Raises:
        InvalidRequest: there is no such level.
    """
    if level not in (0, 1, 2):
        raise InvalidRequest(f"level must be 0, 1 or 2, got {level!r}"[:256], "level")
    return Command.SLEEP_DEEP if level == 2 else Command.SLEEP


COMMANDS = {
    "wake_up": Command.WAKE,
    "reset_prefix_cache": Command.RESET_CACHE,
}


async def call_workers(
    weights: WeightsClient,
    manage: Callable[[Command], Awaitable[object]],
    method: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Carries out one of the methods that workers of vLLM have and trainers call.

    Args:
        manage: sends a command to all engines.

    Raises:
        InvalidRequest: it is none of these.
    """
    if method == "reload_weights":
        path = (kwargs or {}).get("weights_path", next(iter(args), None))
        if not isinstance(path, str):
            raise InvalidRequest("reload_weights needs kwargs.weights_path.", "kwargs")
        return [await weights.update(path)]
    if method == "checksum":
        return [states_as_json(await weights.states())["digest"]]
    command = COMMANDS.get(method) if isinstance(method, str) else None
    if method == "sleep":
        command = sleep_command((kwargs or {}).get("level", next(iter(args), 1)))
    if command is None:
        raise InvalidRequest(
            f"method must be reload_weights, checksum, sleep, {', '.join(COMMANDS)}: no other code "
            "runs in an engine.",
            "method",
        )
    await manage(command)
    return [None]

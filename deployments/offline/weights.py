"""New weights for an engine in this process: its store, and the way from tensors to a commit."""

import asyncio
import itertools
import os
import time
import weakref
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineBusy, InvalidRequest
from rayfin.actors.processes.environment import at_low_priority
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.timing import WEIGHTS_PAUSE_SECONDS, WEIGHTS_POLL_SECONDS
from rayfin.actors.weights.begun import BegunUpdate
from rayfin.actors.weights.sources import propose
from rayfin.actors.weights.store import WeightStore, store_of
from rayfin.actors.weights.version import (
    EngineWeights,
    KeptPages,
    NewRequests,
    PauseMode,
    Vote,
    WeightVersion,
)
from rayfin.deployments.client.weights import (
    DEFAULTS,
    UpdateOptions,
    read_numbers,
    served_place,
    write_version,
)

if TYPE_CHECKING:
    from rayfin.actors.runner.inline import InlineExecutor
    from rayfin.deployments.client.weights import Weights

Ask = Callable[[Engine], Any]

ROOM = "offline"
"""Stores of engines in a process, by its number."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that may be committed."""

    version: WeightVersion
    vote: Vote

    def as_json(self) -> dict[str, Any]:
        """What a caller of an update gets."""
        return {
            "serial": self.version.serial,
            "version": self.version.label,
            "digest": self.version.digest,
            "how": "in place" if self.vote.in_place else "restart",
            "kept": list(self.vote.kept),
        }


class LocalWeights:
    """Versions of an engine in this process.

    Args:
        executor: of the engine.
    """

    def __init__(self, args: EngineArgs, executor: "InlineExecutor") -> None:
        self.args, self._executor = args, executor
        self._store: WeightStore | None = None

    @property
    def store(self) -> WeightStore:
        """Where its versions lie; made at the first use.

        Raises:
            InvalidConfig: others may write there.
        """
        if self._store is None:
            name = f"{os.getpid()}-{next(_numbers)}"
            self._store = store_of(self.args.weight_dir, ROOM, name)
            weakref.finalize(self, self._store.remove)  # of a program that ends without close()
            _remove_abandoned(self._store.folder.parent)
        return self._store

    def stage(
        self, weights: "Weights", label: str = "", options: UpdateOptions = DEFAULTS
    ) -> Staged:
        """Writes and checks a version. The engine may run steps meanwhile.

        Raises:
            InvalidRequest: it does not fit the model; nothing has changed.
            StorageFull: there is no room.
        """
        store = self.store
        version = write_version(store, weights, label, self.args, options)
        version = propose(store, version)
        try:
            return Staged(version, self._executor.vote(version))
        except BaseException:
            store.drop()
            raise

    def commit(self, engine: Engine, staged: Staged, pages: KeptPages = "recompute") -> None:
        """Makes a paused engine compute by a version; of the thread that steps it."""
        version = self.store.commit(staged.version)
        engine.updates.commit(version, in_place=staged.vote.in_place, pages=pages)

    def close(self) -> None:
        """Removes all versions."""
        if self._store is not None:
            self._store.remove()
            self._store = None


class InlineWeights:
    """The ``WeightsClient`` of an engine that a thread of this process steps.

    Args:
        call: has that thread call a function with the engine.
    """

    def __init__(self, local: LocalWeights, call: Callable[[Ask], Awaitable[Any]]) -> None:
        self._local, self._call = local, call
        self._busy = self._by_hand = False

    async def update(
        self, weights: "Weights", version: str = "", options: UpdateOptions = DEFAULTS
    ) -> dict[str, Any]:
        """See ``WeightsClient``."""
        if weights is not None:
            return await self._update(weights, version, options)
        with BegunUpdate(self._local.store).ended():
            return await self._update(weights, version, options)

    async def receive(self, body: AsyncIterable[bytes], version: str) -> WeightVersion:
        """See ``WeightsClient``."""
        return await BegunUpdate(self._local.store).receive(body, version)

    async def abandon(self) -> None:
        """See ``WeightsClient``; an update that is amid ends by itself."""
        BegunUpdate(self._local.store).abandon()

    async def ask_receiver(self, method: str, *arguments: Any) -> Any:
        """See ``WeightsClient``."""
        raise InvalidRequest("an engine of this program joins no group: it takes tensors", None)

    async def _update(
        self, weights: "Weights", version: str, options: UpdateOptions
    ) -> dict[str, Any]:
        if self._busy:
            raise EngineBusy("another update is amid", "weights")
        self._busy, local, began = True, self._local, time.monotonic()
        try:
            stage = partial(local.stage, weights, version, options)
            staged = await asyncio.to_thread(at_low_priority, stage)
            paused = time.monotonic()
            if not self._by_hand:
                async with asyncio.timeout(options.timeout):
                    await self._pause(options.mode, options.new)
            await self._call(lambda engine: local.commit(engine, staged, options.kv))
        except TimeoutError:
            raise EngineBusy("the update took too long: its timeout is over", "timeout") from None
        finally:
            self._busy = False
            if not self._by_hand:
                await self.resume()
        now = time.monotonic()
        seconds = {"seconds": round(now - began, 3), "pause_seconds": round(now - paused, 3)}
        return {**staged.as_json(), "engines": 1, **seconds}

    async def pause(
        self,
        mode: PauseMode = "keep",
        new: NewRequests = "wait",
        seconds: float = WEIGHTS_PAUSE_SECONDS,
    ) -> None:
        """See ``WeightsClient``; it lasts until ``resume``."""
        self._by_hand = True
        await self._pause(mode, new)

    async def _pause(self, mode: PauseMode, new: NewRequests) -> None:
        await self._call(lambda engine: engine.updates.pause(mode, new))
        while not (await self._state()).paused:
            await asyncio.sleep(WEIGHTS_POLL_SECONDS)

    async def resume(self) -> None:
        """See ``WeightsClient``."""
        self._by_hand = False
        await self._call(lambda engine: engine.updates.resume())

    async def rename(self, version: str) -> dict[str, Any]:
        """See ``WeightsClient``."""
        return await self.update(served_place(self._local.store, self._local.args), version)

    async def numbers(self, name: str, count: int) -> list[Any]:
        """See ``WeightsClient``."""
        local = self._local
        return await asyncio.to_thread(read_numbers, local.store, local.args, name, count)

    async def states(self) -> dict[str, EngineWeights]:
        """See ``WeightsClient``."""
        return {"inline": await self._state()}

    async def _state(self) -> EngineWeights:
        state: EngineWeights = await self._call(lambda engine: engine.updates.state(None))
        return state


def _remove_abandoned(folder: Path) -> None:
    """Removes stores of processes that have ended without a word."""
    for path in folder.iterdir():
        number = path.name.partition("-")[0]
        if (
            number.isdigit()
            and not Path(f"/proc/{number}").exists()
            and Path("/proc/self").exists()
        ):
            WeightStore(path).remove()

"""The adapters that an ingress knows by name."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayfin.actors.adapters.files import AdapterFiles
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import EngineUnavailable, InvalidConfig, InvalidRequest, RayfinError
from rayfin.actors.timing import ADAPTER_LIST_SECONDS, ADAPTER_POLL_SECONDS, ADAPTER_RETRY_SECONDS
from rayfin.deployments.adapters.flags import AdapterFlags

logger = logging.getLogger(__name__)

MAX_UNKNOWN = 4096
"""Names that were looked for in --lora-dir and not found, which are remembered for a while."""


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """All names at one moment. ``version`` differs after each change, also of a new registry."""

    version: str = ""
    refs: dict[str, AdapterRef] = field(default_factory=dict)


class Registry(Protocol):
    """The calls of the ``AdapterRegistry``, wherever it runs."""

    async def changed(self, version: str, known: AdapterTable, seconds: float) -> AdapterTable:
        """Returns the table once it has another version, or after so many seconds."""
        ...

    async def read(
        self, name: str, path: str, in_place: bool, files: AdapterFiles | None = None
    ) -> AdapterRef:
        """Reads a folder for a name, which gets it by ``assign``; or takes the ``files`` of it."""
        ...

    async def find(self, name: str) -> AdapterRef | None:
        """What a name means, or its folder in --lora-dir, which it gets by ``assign``."""
        ...

    async def folders(self) -> dict[str, str]:
        """The adapters in --lora-dir, loaded or not: their paths by name."""
        ...

    async def assign(self, ref: AdapterRef, in_place: bool) -> AdapterTable:
        """Gives the name of ``ref`` its content. A name that already has one keeps it, unless
        ``in_place``.
        """
        ...

    async def unload(self, name: str) -> AdapterTable: ...


class AdapterNames:
    """An ingress' copy of the registry's table, which follows it.

    Args:
        check: asks the engines whether an adapter fits the model.
        resolves: whether unknown names are looked for in --lora-dir.
    """

    def __init__(
        self,
        registry: Registry,
        check: Callable[[AdapterRef], Awaitable[None]],
        *,
        resolves: bool = False,
    ) -> None:
        self._registry = registry
        self._check = check
        self._resolves = resolves
        self._table = AdapterTable()
        self._unknown: dict[str, float] = {}  # name -> when to look again
        self._folders: dict[str, str] = {}
        self._list_again = 0.0
        self._looking: dict[str, asyncio.Task[None]] = {}  # by name: a folder is read once
        self._task: asyncio.Task[None] | None = None

    @property
    def refs(self) -> dict[str, AdapterRef]:
        """The adapters by name, in the order in which they were loaded."""
        return self._table.refs

    @classmethod
    async def of(
        cls,
        flags: AdapterFlags,
        registry: Registry,
        check: Callable[[AdapterRef], Awaitable[None]],
    ) -> "AdapterNames":
        """Returns the names that a registry knows, with those of the flags.

        Raises:
            InvalidConfig: one of the flags' adapters cannot be served.
        """
        names = cls(registry, check, resolves=flags.root is not None)
        await names.start()
        try:
            for name, path in flags.modules.items():
                if name not in names.refs:  # another ingress, or an operator, may have loaded it
                    await names.load(name, path, in_place=True)
        except InvalidRequest as error:
            raise InvalidConfig(f"lora_modules: {error.message}", "lora_modules") from error
        return names

    async def start(self) -> None:
        """Gets the table, and follows the registry until ``close``."""
        self._table = await self._registry.changed("", self._table, 0.0)
        self._task = asyncio.create_task(self._follow())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def load(
        self, name: str, path: str, *, in_place: bool = False, files: AdapterFiles | None = None
    ) -> AdapterRef:
        """Loads an adapter; returns when every later request may name it here.

        Args:
            files: what the folder holds, where the registry may not see it.

        Raises:
            NotFound, InvalidRequest: it cannot be served, or the name is taken. A name that
                meant something still does.
        """
        await self._introduce()
        ref = await self._registry.read(name, path, in_place, files)
        await self._check(ref)
        await self._introduce()  # it may have begun since
        self._table = await self._registry.assign(ref, in_place)
        if self._table.refs.get(name) != ref:  # another caller was faster
            raise name_taken(name)
        return ref

    async def unload(self, name: str) -> None:
        """Forgets a name; requests that run go on.

        Raises:
            NotFound: there is no such adapter.
        """
        await self._introduce()
        self._table = await self._registry.unload(name)

    async def find(self, name: str) -> AdapterRef | None:
        """The adapter of that name, also one that is only in --lora-dir yet.

        Raises:
            EngineUnavailable: an engine, or the registry, does not answer.
        """
        if name in self._table.refs or not self._resolves:
            return self._table.refs.get(name)
        if self._unknown.get(name, 0.0) > time.monotonic():
            return None
        task = self._looking.get(name)
        if task is None:
            task = self._looking[name] = asyncio.create_task(self._look_for(name))
            task.add_done_callback(lambda _: self._looking.pop(name, None))
        await asyncio.shield(task)
        return self._table.refs.get(name)

    async def folders(self) -> dict[str, str]:
        """The paths of the adapters in --lora-dir by name, loaded or not, as they were lately."""
        if self._resolves and self._list_again < time.monotonic():
            try:
                self._folders = await self._registry.folders()
            except EngineUnavailable as error:
                logger.warning("adapters are listed as they were: %s", error)
            self._list_again = time.monotonic() + ADAPTER_LIST_SECONDS
        return self._folders

    async def _look_for(self, name: str) -> None:
        """Gives the name of a folder in --lora-dir its adapter, or remembers that it has none."""
        now = time.monotonic()
        try:
            await self._introduce()
            ref = await self._registry.find(name)
            if ref is not None:
                await self._check(ref)
                await self._introduce()
                self._table = await self._registry.assign(ref, in_place=False)
        except InvalidRequest as error:
            logger.warning("adapter %r is not served: %s", name[:128], error)
        if name not in self._table.refs:
            if len(self._unknown) >= MAX_UNKNOWN:
                self._unknown.clear()
            self._unknown[name] = now + ADAPTER_RETRY_SECONDS

    async def _introduce(self) -> None:
        """Has a registry that has just begun learn the names, before it changes any."""
        self._table = await self._registry.changed(self._table.version, self._table, 0.0)

    async def _follow(self) -> None:
        while True:
            table = self._table
            try:
                self._table = await self._registry.changed(
                    table.version, table, ADAPTER_POLL_SECONDS
                )
            except RayfinError as error:
                logger.warning("the registry of adapters does not answer: %s", error)
                await asyncio.sleep(1.0)


def name_taken(name: str) -> InvalidRequest:
    """vLLM's error of a name that has an adapter."""
    return InvalidRequest(
        f"The lora adapter '{name}' has already been loaded. If you want to load the "
        "adapter in place, set 'load_inplace' to True.",
        "lora_name",
    )


def card(ref: AdapterRef) -> dict[str, Any]:
    """An adapter for operators."""
    return {"name": ref.name, "path": ref.path, "digest": ref.digest}

"""The actor that knows the adapters of one model of an application, by name and by content.

A name is a pointer to a digest. Contents stay for a while after a name has moved on, so that
requests that began with an earlier version end with it, also on another engine.
"""

import asyncio
import logging
import os
import time
import uuid
from collections import OrderedDict
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rayfin.actors.adapters.files import AdapterFiles, read_folder
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.adapters.settings import read_settings
from rayfin.actors.adapters.tensors import read_pairs
from rayfin.actors.buckets.folder import is_bucket
from rayfin.actors.errors import (
    EngineUnavailable,
    InvalidConfig,
    InvalidRequest,
    NotFound,
    RayfinError,
)
from rayfin.actors.processes.registry import NAMESPACE
from rayfin.actors.timing import (
    ADAPTER_LIST_SECONDS,
    ADAPTER_READ_SECONDS,
    ADAPTER_REGISTRY_LEASE_SECONDS,
)
from rayfin.actors.timing import ADAPTER_REGISTRY_CALL_SECONDS as SECONDS
from rayfin.deployments.adapters.flags import folder_in, folders_in
from rayfin.deployments.adapters.names import AdapterTable, name_taken

logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 1 << 30
"""Contents held in memory; others are read again from their folder, if it still has them."""

MAX_NAME = 256

OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000}  # most calls only wait


class AdapterContents:
    """The adapters' names and files; one event loop calls it.

    Args:
        store: the name of the actor that runners fetch from; "" lets them read the folders.
        root: the folder of --lora-dir.
    """

    def __init__(self, store: str = "", max_rank: int = 64, root: str | None = None) -> None:
        self.called = time.monotonic()
        self._store = store
        self._max_rank = max_rank
        self._root = root
        self._incarnation = uuid.uuid4().hex[:8]
        self._changes = 0
        self._learned = False  # the names of the registry before this one
        self._refs: dict[str, AdapterRef] = {}
        self._files: OrderedDict[str, AdapterFiles] = OrderedDict()  # by digest
        self._paths: dict[str, str] = {}  # of every digest that was ever loaded
        self._condition = asyncio.Condition()

    @property
    def table(self) -> AdapterTable:
        return AdapterTable(f"{self._incarnation}.{self._changes}", dict(self._refs))

    async def changed(self, version: str, known: AdapterTable, seconds: float) -> AdapterTable:
        """See ``Registry``; a new registry learns the names that the first caller knows."""
        self.called = time.monotonic()
        if not self._learned and known.refs and not version.startswith(self._incarnation):
            self._learned = True
            self._refs = {**known.refs, **self._refs}
            self._paths |= {ref.digest: ref.path for ref in known.refs.values()}
            await self._note_change()
        async with self._condition:
            try:
                async with asyncio.timeout(seconds):
                    await self._condition.wait_for(lambda: self.table.version != version)
            except TimeoutError:
                pass
        return self.table

    async def read(
        self, name: str, path: str, in_place: bool, files: AdapterFiles | None = None
    ) -> AdapterRef:
        """See ``Registry``.

        Raises:
            NotFound, InvalidRequest: it holds no adapter that can be served.
            InvalidRequest: the name is empty, too long or taken.
        """
        if not name or len(name) > MAX_NAME:
            raise InvalidRequest(f"lora_name must have 1 to {MAX_NAME} characters.", "lora_name")
        if name in self._refs and not in_place:
            raise name_taken(name)
        files = await asyncio.to_thread(self._read, path, files)
        self._hold(files, files.folder)
        return AdapterRef(files.digest, name, path, self._store)

    async def assign(self, ref: AdapterRef, in_place: bool) -> AdapterTable:
        """See ``Registry``; a registry that has begun since ``read`` may read the folder again."""
        if self._refs.get(ref.name) != ref and (in_place or ref.name not in self._refs):
            self._refs[ref.name] = ref
            self._paths[ref.digest] = ref.path
            await self._note_change()
        return self.table

    async def unload(self, name: str) -> AdapterTable:
        """Forgets a name.

        Raises:
            NotFound: there is no such adapter.
        """
        if self._refs.pop(name, None) is None:
            raise NotFound(f"The lora adapter '{name[:128]}' cannot be found.", "lora_name")
        await self._note_change()
        return self.table

    async def find(self, name: str) -> AdapterRef | None:
        """See ``Registry``.

        Raises:
            InvalidRequest: what is there cannot be served.
            EngineUnavailable: the bucket of the folder refuses.
        """
        if name in self._refs or self._root is None:
            return self._refs.get(name)
        try:
            folder = await asyncio.to_thread(folder_in, self._root, name)
        except InvalidConfig as error:  # the next request asks the bucket again
            raise EngineUnavailable(error.message) from error
        return None if folder is None else await self.read(name, str(folder), in_place=True)

    async def folders(self) -> dict[str, str]:
        """See ``Registry``."""
        return {} if self._root is None else await asyncio.to_thread(folders_in, self._root)

    async def fetch(self, digest: str) -> AdapterFiles | None:
        """The content, None if neither memory nor its folder has it any more."""
        if digest in self._files:
            self._files.move_to_end(digest)
            return self._files[digest]
        path = self._paths.get(digest)
        if path is None:
            return None
        try:
            files = await asyncio.to_thread(read_folder, path)
        except RayfinError as error:
            logger.warning("the content of an adapter is gone: %s", error)
            return None
        if files.digest != digest:
            return None
        self._hold(files, path)
        return files

    def _read(self, path: str, files: AdapterFiles | None) -> AdapterFiles:
        files = files or read_folder(path)
        read_pairs(files, read_settings(files.config, self._max_rank))
        _ = files.digest  # computed in this thread
        return files

    def _hold(self, files: AdapterFiles, path: str) -> None:
        self._paths[files.digest] = path
        self._files[files.digest] = files
        self._files.move_to_end(files.digest)
        held = sum(len(files.weights) for files in self._files.values())
        while held > MAX_HELD_BYTES and len(self._files) > 1:
            held -= len(self._files.popitem(last=False)[1].weights)

    async def _note_change(self) -> None:
        self._changes += 1
        async with self._condition:
            self._condition.notify_all()


@ray.remote(**OPTIONS)
class AdapterRegistry:
    """``AdapterContents`` as an actor; it exits when no ingress has asked for a while."""

    def __init__(self, name: str, max_rank: int, root: str | None) -> None:
        self._contents = AdapterContents(name, max_rank, root)
        self._watch: asyncio.Task[None] | None = None

    async def changed(self, version: str, known: AdapterTable, seconds: float) -> AdapterTable:
        if self._watch is None:
            self._watch = asyncio.create_task(self._leave_when_unused())
        return await self._contents.changed(version, known, seconds)

    async def read(
        self, name: str, path: str, in_place: bool, files: AdapterFiles | None = None
    ) -> AdapterRef:
        return await self._contents.read(name, path, in_place, files)

    async def assign(self, ref: AdapterRef, in_place: bool) -> AdapterTable:
        return await self._contents.assign(ref, in_place)

    async def unload(self, name: str) -> AdapterTable:
        return await self._contents.unload(name)

    async def find(self, name: str) -> AdapterRef | None:
        return await self._contents.find(name)

    async def folders(self) -> dict[str, str]:
        return await self._contents.folders()

    async def fetch(self, digest: str) -> AdapterFiles | None:
        return await self._contents.fetch(digest)

    async def _leave_when_unused(self) -> None:
        while time.monotonic() - self._contents.called < ADAPTER_REGISTRY_LEASE_SECONDS:
            await asyncio.sleep(1.0)
        os._exit(0)


class RegistryClient:
    """A ``Registry`` that starts the actor ``name`` where there is none."""

    def __init__(self, name: str, max_rank: int, root: str | None) -> None:
        self._settings = (name, max_rank, root)

    async def changed(self, version: str, known: AdapterTable, seconds: float) -> AdapterTable:
        patience = seconds + SECONDS
        table: AdapterTable = await self._call(patience, "changed", version, known, seconds)
        return table

    async def read(
        self, name: str, path: str, in_place: bool, files: AdapterFiles | None = None
    ) -> AdapterRef:
        asked = ("read", name, path, in_place, files)
        ref: AdapterRef = await self._call(ADAPTER_READ_SECONDS, *asked)
        return ref

    async def find(self, name: str) -> AdapterRef | None:
        root = self._settings[2]
        seconds = SECONDS if root is None or not is_bucket(root) else ADAPTER_READ_SECONDS
        ref: AdapterRef | None = await self._call(seconds, "find", name)
        return ref

    async def folders(self) -> dict[str, str]:
        paths: dict[str, str] = await self._call(ADAPTER_LIST_SECONDS, "folders")
        return paths

    async def assign(self, ref: AdapterRef, in_place: bool) -> AdapterTable:
        table: AdapterTable = await self._call(SECONDS, "assign", ref, in_place)
        return table

    async def unload(self, name: str) -> AdapterTable:
        table: AdapterTable = await self._call(SECONDS, "unload", name)
        return table

    async def _call(self, seconds: float, method: str, *args: Any) -> Any:
        try:
            actor = await asyncio.to_thread(start_registry, *self._settings)
            async with asyncio.timeout(seconds):
                return await getattr(actor, method).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, RayfinError):
                raise error.cause from None
            raise EngineUnavailable(f"the registry of adapters failed: {error.cause}") from error
        except (RayError, TimeoutError, ValueError) as error:
            raise EngineUnavailable("the registry of adapters does not answer") from error


def start_registry(name: str, max_rank: int, root: str | None) -> Any:
    """The actor ``name``, which is started if there is none."""
    actor_class: Any = AdapterRegistry  # Ray's stubs lose `options` on a decorated class
    return actor_class.options(
        name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote(name, max_rank, root)

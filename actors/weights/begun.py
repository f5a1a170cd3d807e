"""The version that a trainer has sent and not yet committed; one at a time on a node."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rayfin.actors.errors import EngineBusy, EngineUnavailable, InvalidRequest, StorageFull
from rayfin.actors.model_files.digests import tensors_digest
from rayfin.actors.timing import WEIGHTS_ABANDONED_SECONDS
from rayfin.actors.weights.sources import UNREADABLE
from rayfin.actors.weights.store import BEGUN, WeightStore
from rayfin.actors.weights.version import WeightVersion
from rayfin.actors.weights.writer import PART_SUFFIX

BLOCK_BYTES = 4 << 20
"""Of a body, written at once."""


class BegunUpdate:
    """A record of a store: it outlives who has written it, and is dropped after a while."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def receive(self, body: AsyncIterable[bytes], label: str) -> WeightVersion:
        """Writes the bytes of a safetensors file as they come.

        Raises:
            EngineBusy: an update is begun.
            InvalidRequest: they are no such file.
            StorageFull: there is no room.
        """
        self.check_free()
        handle, name = tempfile.mkstemp(PART_SUFFIX, dir=self._store.folder)
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                held = bytearray()
                async for piece in body:
                    held += piece
                    if len(held) >= BLOCK_BYTES:
                        await asyncio.to_thread(file.write, held)
                        held = bytearray()
                await asyncio.to_thread(file.write, held)
            return await asyncio.to_thread(self._begin, part, label)
        except OSError as error:
            raise StorageFull(
                f"{part.parent} has no room for the weights: {error.strerror}", "weights"
            ) from None
        finally:
            part.unlink(missing_ok=True)

    def _begin(self, part: Path, label: str) -> WeightVersion:
        try:
            with safe_open(part, framework="numpy"):
                pass  # it compares the header with the file's size
            digest = tensors_digest([part])
        except (*UNREADABLE, SafetensorError) as error:
            raise InvalidRequest(
                f"The body is no whole safetensors file: {error}; pickles are never read", "body"
            ) from None
        version = WeightVersion(0, label, digest, str(self._store.file_of(digest)))
        self.keep(version, part)
        return version

    def keep(self, version: WeightVersion, part: Path | None = None) -> None:
        """Keeps a version, whose tensors are there.

        Args:
            part: their file, if it does not have its name yet.

        Raises:
            EngineBusy: an update is begun.
            StorageFull: there is no room.
        """
        with self._store.alone():
            self.check_free()
            self._store.write(BEGUN, version)
            if part is not None:
                part.replace(version.place)

    def of(self, label: str = "") -> WeightVersion:
        """The version that is begun.

        Args:
            label: its name; empty: whatever it is.

        Raises:
            EngineBusy: there is none, or another one.
        """
        self._store.clean()
        version = self._store.read(BEGUN)
        if version is None:
            raise EngineBusy("no update is begun: send its tensors before", "version")
        if label not in ("", version.label):
            raise EngineBusy(self._says(version), "version")
        return version

    def abandon(self) -> None:
        """Forgets it."""
        (self._store.folder / BEGUN).unlink(missing_ok=True)
        self._store.clean()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Forgets it after this, but where the update may be tried again."""
        try:
            yield
        except (EngineBusy, EngineUnavailable):
            raise
        except BaseException:
            self.abandon()
            raise
        self.abandon()

    def check_free(self) -> None:
        """Returns if no update is begun.

        Raises:
            EngineBusy: one is; the message says since when.
        """
        version = self._store.read(BEGUN)
        if version is not None and self._age() <= WEIGHTS_ABANDONED_SECONDS:
            raise EngineBusy(self._says(version), "version")

    def _says(self, version: WeightVersion) -> str:
        return f"an update {version.label!r} is begun, since {self._age():.0f} s"

    def _age(self) -> float:
        return time.time() - (self._store.folder / BEGUN).stat().st_mtime

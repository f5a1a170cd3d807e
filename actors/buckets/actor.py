"""One reader of a bucket for all nodes of a cluster: each byte leaves the store once.

The node that needs a folder first has the reader, which reads files into that node's cache. Other
nodes get them from it in chunks, as objects of Ray. If it dies, the next node that asks has one.
"""

import os
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfin.actors.buckets.folder import CHUNK_BYTES, Listing, keep, part_of, read_file
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.processes.registry import NAMESPACE
from rayfin.actors.timing import BUCKET_READER_LEASE_SECONDS, NAME_POLL_SECONDS

IN_FLIGHT = 4  # chunks on their way to a node
TRIES = 5  # of a file whose reader dies, and of a chunk that is not the one that was read
OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 2 * IN_FLIGHT}


@ray.remote(**OPTIONS)
class BucketReader:
    """Reads one folder of a bucket; it exits when it has not been asked for a while."""

    def __init__(self, uri: str, folder: str) -> None:
        self._uri = uri
        self._folder = Path(folder)
        self._reading = threading.Lock()
        self._asked = time.monotonic()
        threading.Thread(target=self._leave_when_unused, daemon=True).start()

    def read(self, name: str, seen: tuple[int, int]) -> None:
        """Returns when the file is in the cache of this node.

        Raises:
            InvalidConfig: as ``read_file``.
        """
        with self._reading:
            if not (self._folder / name).is_file():
                read_file(self._uri, name, seen, self._folder)
            self._asked = time.monotonic()

    def chunk(self, name: str, place: int) -> tuple[bytes, int]:
        """Bytes of a file from ``place`` on, and their CRC."""
        self._asked = time.monotonic()
        with (self._folder / name).open("rb") as file:
            file.seek(place)
            data = file.read(CHUNK_BYTES)
        return data, zlib.crc32(data)

    def _leave_when_unused(self) -> None:
        while time.monotonic() - self._asked < BUCKET_READER_LEASE_SECONDS:
            time.sleep(1.0)
            if self._reading.locked():
                self._asked = time.monotonic()
        os._exit(0)


def read_by_actor(uri: str, folder: Path, files: Listing) -> None:
    """Reads files into the folder of this node; those that no reader gives are left out.

    Raises:
        InvalidConfig: the store refuses, or a file changes while it is read.
    """
    for name, seen in files.items():
        for _ in range(TRIES):
            try:
                reader = _reader(uri, folder)
                ray.get(reader.read.remote(name, seen))
                if not (folder / name).is_file():  # the reader is on another node
                    with part_of(folder / name) as part:
                        with part.open("wb") as file:
                            _fetch(reader, name, seen[0], file)
                        keep(part, folder / name, seen[0])
                break
            except RayActorError:  # the next one reads what is missing
                time.sleep(NAME_POLL_SECONDS)
            except RayTaskError as error:
                if isinstance(error.cause, InvalidConfig):
                    raise error.cause from None
                break
            except (RayError, ValueError):  # no actor can be had
                break


def _reader(uri: str, folder: Path) -> Any:
    """Returns the reader of a folder, which is started on this node if there is none."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor_class: Any = BucketReader  # Ray's stubs lose `options` on a decorated class
    return actor_class.options(
        name=f"bucket/{folder.name}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=here,
    ).remote(uri, str(folder))


def _fetch(reader: Any, name: str, size: int, file: BinaryIO) -> None:
    """Writes a file of the reader's node, a few chunks ahead.

    Raises:
        InvalidConfig: what arrives is not what was read.
    """
    places = deque(range(0, size, CHUNK_BYTES))
    coming: deque[tuple[int, Any]] = deque()
    while places or coming:
        while places and len(coming) < IN_FLIGHT:
            place = places.popleft()
            coming.append((place, reader.chunk.remote(name, place)))
        place, chunk = coming.popleft()
        for _ in range(TRIES):
            data, crc = ray.get(chunk)
            if zlib.crc32(data) == crc and len(data) == min(CHUNK_BYTES, size - place):
                break
            chunk = reader.chunk.remote(name, place)
        else:
            raise InvalidConfig(f"{name} arrives damaged from another node", "model")
        file.write(data)

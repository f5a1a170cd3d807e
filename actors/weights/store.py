"""The versions of a deployment's weights on this node.

    FOLDER/<digest>.safetensors   tensors of a version, unless they stay in the trainer's folder
    FOLDER/NEXT                   the version that is proposed, JSON
    FOLDER/BEGUN                  the version that a trainer has sent (begun.py)
    FOLDER/CURRENT                the version that is decided: what any runner loads; none: the base
    FOLDER/READ                   the digest of a trainer's files, and their states when it was read

Each appears whole, by a rename. To decide is to rename NEXT to CURRENT, which needs no space. All
engines of the deployment on this node share the folder, so a decision that was made is found made.
"""

import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rayfin.actors.errors import InvalidConfig, StorageFull
from rayfin.actors.timing import WEIGHTS_ABANDONED_SECONDS
from rayfin.actors.weights.version import WeightVersion
from rayfin.actors.weights.writer import FILE_SUFFIX, PART_SUFFIX, TensorWriter

FOLDER_MODE, FILE_MODE = 0o700, 0o600
SHARED_MEMORY = Path("/dev/shm")
CURRENT, NEXT, BEGUN, READ, LOCK = "CURRENT", "NEXT", "BEGUN", "READ", "LOCK"
TICK_NS, SECOND_NS = 50_000_000, 1_000_000_000
"""Longer than what clocks of files are behind; of those that count whole seconds, a second."""

FileStates = list[list[str | int]]
"""Of files: path, device, inode, size and time of the last write."""


def file_states(files: Iterable[Path]) -> FileStates | None:
    """The states of files, or None if one may be written without another state."""
    states: FileStates = []
    for path in files:
        status = path.stat()
        written = status.st_mtime_ns
        tick = TICK_NS if written % SECOND_NS else 2 * SECOND_NS
        if time.time_ns() - written < tick:
            return None
        states.append([str(path), status.st_dev, status.st_ino, status.st_size, written])
    return states


class WeightStore:
    """Versions below ``folder``, two at most, and one that a trainer has begun.

    Raises:
        InvalidConfig: others may write there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in (folder.parent, folder):
            part.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise InvalidConfig(f"weight_dir {folder} belongs to another user", "weight_dir")
        if status.st_mode & 0o022:
            raise InvalidConfig(f"weight_dir {folder} can be written by others", "weight_dir")

    @property
    def current(self) -> WeightVersion:
        """The version that is decided."""
        return self.read(CURRENT) or WeightVersion()

    @property
    def proposed(self) -> WeightVersion | None:
        """The version that may be decided."""
        return self.read(NEXT)

    def writer(self) -> TensorWriter:
        """Begins a file of tensors."""
        return TensorWriter(self.folder)

    def propose(self, version: WeightVersion) -> None:
        """Makes a version, whose tensors are there, the next one; files of others go.

        Raises:
            StorageFull: there is no room.
        """
        self.write(NEXT, version)
        self.clean()

    def commit(self, version: WeightVersion) -> WeightVersion:
        """Decides for the proposed version, unless that is done, and returns it.

        Raises:
            InvalidConfig: this node has no such version.
        """
        if (current := self.current).serial >= version.serial:
            return current
        known = self.proposed
        if known is None or (known.serial, known.digest) != (version.serial, version.digest):
            if (current := self.current).serial >= version.serial:  # just now, by another engine
                return current
            raise InvalidConfig(
                f"weights {version.label!r} are not on this node: send them again", "weights"
            )
        with suppress(FileNotFoundError):  # an engine beside this one was faster
            os.replace(self.folder / NEXT, self.folder / CURRENT)
        self.clean()
        return self.current

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other process of this node writes versions."""
        with (self.folder / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def touch(self) -> None:
        """Says that an engine still serves from here."""
        with suppress(OSError):
            (self.folder / LOCK).touch(FILE_MODE)

    def forget(self, seconds: float) -> None:
        """Removes all versions if no engine has served from here for so many seconds."""
        with suppress(FileNotFoundError):
            if time.time() - (self.folder / LOCK).stat().st_mtime < seconds:
                return
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Forgets the proposed version."""
        with suppress(FileNotFoundError):
            (self.folder / NEXT).unlink()
        self.clean()

    def remove(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def file_of(self, digest: str) -> Path:
        """Where the tensors of a version lie that were sent."""
        return self.folder / (digest + FILE_SUFFIX)

    @property
    def digests(self) -> set[str]:
        """Of all versions whose tensors stay."""
        known = (self.current, self.proposed, self.read(BEGUN))
        return {version.digest for version in known if version is not None}

    def note_digest(self, digest: str, states: FileStates) -> None:
        """Remembers the digest of files, which had these states before they were read for it."""
        with suppress(StorageFull):
            self._write(READ, json.dumps([digest, states]))

    def has_noted(self, digest: str, states: FileStates | None) -> bool:
        """Whether files in these states have that digest; False if they may have."""
        try:
            noted = json.loads((self.folder / READ).read_text())
        except (OSError, ValueError):
            return False
        return bool(states) and noted == [digest, states]

    def read(self, name: str) -> WeightVersion | None:
        """What a record says; None if there is none."""
        try:
            return WeightVersion.of_json((self.folder / name).read_text())
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, name: str, version: WeightVersion) -> None:
        """Writes a record.

        Raises:
            StorageFull: there is no room.
        """
        self._write(name, version.as_json())

    def _write(self, name: str, text: str) -> None:
        part = self.folder / f"{name}{PART_SUFFIX}"
        try:
            part.write_text(text)
            part.chmod(FILE_MODE)
            part.replace(self.folder / name)
        except OSError as error:
            raise StorageFull(f"{self.folder} has no room: {error}", "weights") from None

    def clean(self) -> None:
        """Removes what was left for too long, and files of versions that are none of these.

        Who has mapped one keeps it.
        """
        # Of a trainer that died while it wrote, or before it said what becomes of it.
        for path in (self.folder / BEGUN, *self.folder.glob(f"*{PART_SUFFIX}")):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > WEIGHTS_ABANDONED_SECONDS:
                    path.unlink()
        kept = self.digests
        for path in self.folder.glob(f"*{FILE_SUFFIX}"):
            if path.stem not in kept:
                with suppress(OSError):
                    path.unlink()


def default_root() -> Path:
    """Where versions lie unless ``weight_dir`` says so: the node's shared memory, or a disk."""
    roomy = os.access(SHARED_MEMORY, os.W_OK) and SHARED_MEMORY.is_dir()
    base = SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
    return base / f"rayfin-weights-{os.getuid()}"


def store_of(weight_dir: str | None, *names: str) -> WeightStore:
    """The store of a deployment, by its names.

    Raises:
        InvalidConfig: others may write there.
    """
    root = default_root() if weight_dir is None else Path(weight_dir).expanduser()
    root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    if weight_dir is None:
        WeightStore(root)  # another user has not made it
    _remove_ended(root, names[0])
    return WeightStore(root.joinpath(*(name.replace("/", "_") for name in names)))


def _remove_ended(root: Path, session: str) -> None:
    """Removes the stores of Ray sessions that have ended: no engine says that it serves there."""
    for depth in ("*", "*/*"):
        for lock in root.glob(f"session_*/{depth}/{LOCK}"):
            with suppress(OSError):
                silent = time.time() - lock.stat().st_mtime
                if session not in lock.parts and silent > WEIGHTS_ABANDONED_SECONDS:
                    shutil.rmtree(lock.parent, ignore_errors=True)

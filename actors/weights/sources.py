"""Versions that are files already: a trainer's folder, or chunks of a file from another node."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, InvalidRequest, StorageFull
from rayfin.actors.model_files.digests import tensors_digest, weight_files
from rayfin.actors.model_files.files import find_file
from rayfin.actors.weights.store import WeightStore, file_states
from rayfin.actors.weights.version import WeightVersion
from rayfin.actors.weights.writer import PART_SUFFIX

UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, InvalidConfig)
"""What paths, indexes and files raise that somebody else has written."""


def base_files(args: EngineArgs) -> list[Path]:
    """The safetensors files of the model's own weights; none where it has no such files."""
    config = find_file(args.model, "config.json", **args.hub)
    return [] if config is None or args.load_format == "dummy" else weight_files(config.parent)


def folder_version(path: str, label: str = "", store: WeightStore | None = None) -> WeightVersion:
    """A folder of safetensors files, or one such file, as a version.

    The files stay where they are, and have to stay as they are while the version is served.

    Args:
        label: the trainer's name of the version.
        store: remembers their digest, so that engines of this node need not read them for it.

    Raises:
        InvalidRequest: there is no such file, or it cannot be read.
    """
    try:
        place = Path(path).expanduser().resolve()
        if place.suffix == ".bin" or (place.is_dir() and not any(place.glob("*.safetensors"))):
            raise InvalidRequest(
                f"{path} holds no .safetensors file; pickles are never read", "path"
            )
        files = WeightVersion(place=str(place)).files
        if not all(_is_inside(file.resolve(), place) for file in files):
            raise InvalidRequest(f"{path} holds a link out of it", "path")
        if any(file.exists() and not file.is_file() for file in files):  # a pipe has no end
            raise InvalidRequest(f"{path} holds what is no file", "path")
        seen = file_states(files)
        digest = tensors_digest(files)
        if store is not None and seen is not None:
            store.note_digest(digest, seen)
    except UNREADABLE as error:
        raise InvalidRequest(f"{path!r} cannot be read: {error}", "path") from None
    return WeightVersion(0, label, digest, str(place))


def place_version(
    store: WeightStore, version: WeightVersion, chunks: Iterable[Any] = ()
) -> WeightVersion:
    """Returns the version with its place on this node, and proposes it; once for all engines here.

    Args:
        chunks: bytes of its file, for nodes that do not have it.

    Raises:
        InvalidRequest: its tensors are not here, or are others.
        StorageFull: there is no room.
    """
    with store.alone():
        known = store.proposed
        if known is not None and (known.serial, known.digest) == (version.serial, version.digest):
            return known
        path = store.file_of(version.digest)
        if not Path(version.place).exists():
            write_chunks(path, chunks, version.digest)
            version = replace(version, place=str(path))
        # A file of the store has its name since its digest was computed.
        if Path(version.place) != path and not _holds(store, version):
            raise InvalidRequest(f"{version.place} has not the tensors that were sent", "weights")
        store.propose(version)
    return version


def write_chunks(path: Path, chunks: Iterable[Any], digest: str) -> None:
    """Writes the bytes of a file, which appears whole.

    Raises:
        InvalidRequest: there are none, or their tensors have another digest.
        StorageFull: there is no room.
    """
    part = path.with_suffix(PART_SUFFIX)
    try:
        with part.open("wb") as file:
            for chunk in chunks:
                file.write(memoryview(chunk))
            empty = not file.tell()
        if empty:
            raise InvalidRequest(f"{path.stem} is not on this node: send the weights", "weights")
        if _digest([part]) != digest:
            raise InvalidRequest(
                f"{path.stem}: these are not the tensors that were sent", "weights"
            )
        part.replace(path)
    except OSError as error:
        raise StorageFull(f"{path.parent} has no room: {error.strerror}", "weights") from None
    finally:
        part.unlink(missing_ok=True)


def _holds(store: WeightStore, version: WeightVersion) -> bool:
    """Whether the files of a version have its digest: as they were read for it, or read now."""
    try:
        files = version.files
    except UNREADABLE:
        return False
    seen = file_states(files)
    return store.has_noted(version.digest, seen) or _digest(files) == version.digest


def _digest(files: Iterable[Path]) -> str:
    try:
        return tensors_digest(files)
    except UNREADABLE:
        return ""


def _is_inside(file: Path, place: Path) -> bool:
    """Whether a file lies where it says, or among the blobs of the Hub's cache."""
    blobs = place.parent.parent / "blobs"
    return file.is_relative_to(place) or (
        place.parent.name == "snapshots" and file.is_relative_to(blobs)
    )


def propose(store: WeightStore, version: WeightVersion) -> WeightVersion:
    """Proposes a version as the next one of a store, and returns it with its number.

    Raises:
        StorageFull: there is no room.
    """
    serial = store.current.serial + 1
    version = replace(version, serial=serial, label=version.label or str(serial))
    store.propose(version)
    return version

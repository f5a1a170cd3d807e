"""Models out of object stores: a folder on each node that needs one, made once.

It lies in a cache and is found by the address and by the files' names, sizes and times: new weights
are another folder. Ingresses and builders read the small files alone, runners the weights too. On a
Ray cluster one actor reads the bucket for all nodes (actor.py).
"""

import fcntl
import glob
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfin.actors.errors import InvalidConfig

if TYPE_CHECKING:
    from rayfin.actors.config import EngineArgs

CACHE = "RAYFIN_BUCKET_CACHE"
"""The environment variable with the folder of these folders; default ~/.cache/rayfin/buckets."""

SCHEMES = ("s3://", "gs://", "gcs://", "abfs://", "abfss://", "azure://", "file://")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
CHUNK_BYTES = 8 << 20
TRIES = 2  # of a file that breaks off, or changes while it is read
SECRET = re.compile(r"//(?:[^/@]*|[^/@:\s]*:[^@\s]*)@(?!$)")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
ANONYMOUS = "anonymous@"
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
NO_PACKAGE = "object stores need a package: pip install 'rayfin[cloud]'"

Listing = dict[str, tuple[int, int]]
"""Sizes in bytes and times in ns of all files, by their paths below the address."""


def is_bucket(name: str) -> bool:
    """Whether a model's name is the address of a folder in an object store."""
    return name.startswith(SCHEMES)


def at_hand(args: "EngineArgs") -> "EngineArgs":
    """The settings with a folder of this node, with its weights, in place of a bucket.

    Raises:
        InvalidConfig: as :func:`bucket_folder`.
    """
    if not is_bucket(args.model):
        return args
    tokenizer = args.tokenizer
    if tokenizer is not None and is_bucket(tokenizer):
        tokenizer = str(bucket_folder(tokenizer, weights=False))
    return replace(args, model=str(bucket_folder(args.model)), tokenizer=tokenizer)


def bucket_folder(uri: str, *, weights: bool = True) -> Path:
    """The folder on this node with the files below an address; what is missing is read first.

    ``anonymous@`` before the bucket's name reads without credentials; AWS_ENDPOINT_URL names
    another store than Amazon's. One process of a node reads, the others wait; the nodes of a Ray
    cluster read each byte once.

    Args:
        weights: whether the weights are needed too.

    Raises:
        InvalidConfig: a package is missing, there is no such folder, the store refuses, or a file
            changes while it is read.
    """
    listing = list_files(uri)
    if "config.json" not in listing and "adapter_config.json" not in listing:
        raise InvalidConfig(f"{shown(uri)} holds no config.json", "model")
    kept = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "rayfin" / "buckets")
    digest = hashlib.sha256(repr((uri.rstrip("/"), sorted(listing.items()))).encode()).hexdigest()
    folder = kept / f"{uri.rstrip('/').rpartition('/')[2]}-{digest[:16]}"
    wanted = [name for name in listing if weights or not name.endswith(WEIGHTS)]

    def missing() -> Listing:
        return {name: listing[name] for name in wanted if not (folder / name).is_file()}

    if not missing():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (kept / f"{folder.name}.lock").open("w")
    except OSError as error:
        message = f"{kept} cannot be written ({error.strerror}); {CACHE} names another folder"
        raise InvalidConfig(message, "model") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # An inline engine imports no Ray. Of an adapter its registry is the only reader.
        ray = sys.modules.get("ray") if weights and "config.json" in listing else None
        if ray is not None and ray.is_initialized():
            from rayfin.actors.buckets.actor import read_by_actor

            read_by_actor(uri, folder, missing())
        for name, seen in missing().items():
            read_file(uri, name, seen, folder)
    return folder


def shown(uri: str) -> str:
    """Returns the address without what may be a key."""
    return SECRET.sub("//", uri)


def list_files(uri: str) -> Listing:
    """Sizes and times of all files below an address.

    Raises:
        InvalidConfig: as :func:`bucket_folder`.
    """
    from_environment = "keys of a store come from the environment alone"
    if _has_secret(uri):
        raise InvalidConfig(f"{shown(uri)}: {from_environment}", "model")
    return _list(*_open(uri), shown(uri))


def read_file(uri: str, name: str, seen: tuple[int, int], folder: Path) -> None:
    """Reads a file of the bucket; it has its name only when it is whole.

    Args:
        seen: its size and time in the listing.

    Raises:
        InvalidConfig: the store refuses, or the file changes while it is read.
    """
    store, root = _open(uri)
    path = f"{root}/{name}"
    error = InvalidConfig(f"{shown(uri)}: {name} changes while it is read", "model")
    for _ in range(TRIES):
        with part_of(folder / name) as part:
            try:
                with store.open_input_stream(path, compression=None) as source:
                    _write(part, source)
                now = store.get_file_info(path)
            except (OSError, ValueError) as failure:
                error = _refused(f"{shown(uri)}, {name}", failure)
                continue
            if (now.size, now.mtime_ns or 0) == seen and keep(part, folder / name, seen[0]):
                return
    raise error


def _write(part: Path, source: Any) -> None:
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with part.open("wb") as file:
        while count := source.readinto(chunk):
            file.write(chunk[:count])


@contextmanager
def part_of(target: Path) -> Iterator[Path]:
    """A file beside ``target`` for what is read of it so far; at the end it is gone."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield part
    except OSError as error:
        raise InvalidConfig(f"{target} cannot be written: {error.strerror}", "model") from error
    finally:
        part.unlink(missing_ok=True)


def keep(part: Path, target: Path, size: int) -> bool:
    """Gives a file its name if it is whole, and removes what others have left of it."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    if part.stat().st_size != size:
        return False
    part.rename(target)
    for left in target.parent.glob(f"{glob.escape(target.name)}.*.part"):
        left.unlink(missing_ok=True)
    return True


def _has_secret(uri: str) -> bool:
    """Whether a key stands before a bucket's name, which errors and logs would show."""
    scheme, _, rest = uri.partition("://")
    if scheme not in ("s3", "gs", "gcs"):
        return False
    bucket = rest.removeprefix(ANONYMOUS).partition("/")[0]
    return "@" in bucket or (":" in bucket and "@" in rest)


def _open(uri: str) -> tuple[Any, str]:
    """The store and the path in it."""
    try:
        from pyarrow import fs
    except ImportError:
        raise InvalidConfig(f"{shown(uri)}: {NO_PACKAGE}", "model") from None
    scheme, _, rest = uri.partition("://")
    anonymous = rest.startswith(ANONYMOUS)
    rest = rest.removeprefix(ANONYMOUS).rstrip("/")
    try:
        if scheme == "s3":
            endpoint = next(filter(None, map(os.environ.get, ENDPOINTS)), None)
            options: dict[str, Any] = {"anonymous": True} if anonymous else {}
            if endpoint is not None:
                way, _, host = endpoint.rpartition("://")
                options |= {"endpoint_override": host, "scheme": way or "https"}
            elif not any(map(os.environ.get, REGIONS)):
                with suppress(OSError):  # what is wrong the listing says
                    options["region"] = fs.resolve_s3_region(rest.partition("/")[0])
            return fs.S3FileSystem(**options), rest
        if scheme in ("gs", "gcs") and anonymous:
            return fs.GcsFileSystem(anonymous=True), rest
        known = {"azure": "abfss", "gcs": "gs"}.get(scheme, scheme)
        store, path = fs.FileSystem.from_uri(f"{known}://{rest}")
        return store, path.rstrip("/")
    except (OSError, ValueError) as error:
        raise _refused(shown(uri), error) from error


def _list(store: Any, root: str, where: str) -> Listing:
    from pyarrow import fs

    try:
        infos = store.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, ValueError) as error:
        raise _refused(where, error) from error
    listing = {
        info.path[len(root) :].lstrip("/"): (info.size, info.mtime_ns or 0)
        for info in infos
        if info.is_file
    }
    for name in listing:
        if ".." in name.split("/"):
            raise InvalidConfig(f"{where} holds a file outside of its folder: {name}", "model")
    return listing


def _refused(where: str, error: Exception) -> InvalidConfig:
    why = str(error).partition("\n")[0]
    return InvalidConfig(f"{where} cannot be read: {SECRET.sub('//', why)}", "model")

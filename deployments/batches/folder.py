"""The folder of files and batches: the one copy of what there is, and of how far it is.

    files/{id}/data, meta.json
    batches/{id}/input.jsonl, batch.json, output.jsonl, errors.jsonl, lock, cancel

Every process of the application sees the folder. A record is written beside its place, synced and
renamed, so that a reader finds a whole one. A new file or batch appears by the rename of its
folder. The kernel frees the lock of a batch when the process that holds it ends, however it does.
"""

import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rayfin.actors.errors import InvalidConfig, InvalidRequest, NotFound, Overloaded, StorageFull
from rayfin.actors.timing import UPLOAD_STALE_SECONDS
from rayfin.deployments.batches.answers import sync_folder
from rayfin.deployments.batches.objects import (
    BATCH_ID,
    FILE_ID,
    StoredBatch,
    StoredFile,
    new_batch_id,
    new_file_id,
    window_seconds,
)

COPY_BYTES = 2**20
TEMPORARY = ".new-"


@dataclass(frozen=True, slots=True)
class FolderLimits:
    """What tenants may store."""

    max_file_bytes: int = 200 * 2**20
    max_lines: int = 50_000  # of a batch
    max_files: int = 1000  # of a tenant
    max_open: int = 100  # batches of a tenant that have not ended
    retention: float = 30 * 24 * 3600.0  # seconds that files and ended batches are kept


class BatchFolder:
    """Files and batches of all tenants; methods block, and are called in threads.

    Raises:
        InvalidConfig: the folder cannot be written.
    """

    def __init__(self, path: Path, limits: FolderLimits | None = None) -> None:
        self.limits = limits or FolderLimits()
        self._files, self._batches = path / "files", path / "batches"
        self._ended: dict[str, StoredBatch] = {}  # their records do not change
        try:
            for folder in (self._files, self._batches):
                folder.mkdir(parents=True, exist_ok=True)
            probe = path / f"{TEMPORARY}{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InvalidConfig(
                f"batch_dir {path} cannot be written: {error.strerror}", "batch_dir"
            ) from None

    # Files

    def add_file(
        self,
        tenant: str,
        source: BinaryIO,
        *,
        filename: str,
        purpose: str,
        expires_after: int | None = None,
    ) -> StoredFile:
        """Copies an upload; it is there whole or not at all.

        Raises:
            InvalidRequest: it is empty.
            Overloaded: the tenant has too many files.
            StorageFull: the disk is full.
        """
        if sum(file.purpose == "batch" for file in self.files(tenant)) >= self.limits.max_files:
            raise Overloaded(f"There are {self.limits.max_files} files already: delete some.")
        now = int(time.time())
        expires = now + int(self.limits.retention if expires_after is None else expires_after)
        file = StoredFile(new_file_id(), tenant, filename, purpose, 0, now, expires)
        with _storing(self._files, file.id) as folder:
            with (folder / "data").open("wb") as data:
                shutil.copyfileobj(source, data, COPY_BYTES)
                file.bytes = data.tell()
                os.fsync(data.fileno())
            if not file.bytes:
                raise InvalidRequest("The file is empty.", "file")
            _write_json(folder / "meta.json", asdict(file))
        return file

    def file(self, tenant: str, file_id: str) -> StoredFile:
        """Raises:
        NotFound: there is none of the tenant's.
        """
        if FILE_ID.fullmatch(file_id):
            meta = _read_json(self._files / file_id / "meta.json")
            if meta is not None and meta["tenant"] == tenant:
                return StoredFile(**meta)
        raise NotFound(f"No such File object: {file_id[:64]}", "id")

    def files(self, tenant: str) -> list[StoredFile]:
        """The tenant's, the newest first."""
        metas = (_read_json(path / "meta.json") for path in _entries(self._files))
        files = [StoredFile(**value) for value in metas if value and value["tenant"] == tenant]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def content(self, tenant: str, file_id: str) -> Path:
        """The path of the file's bytes.

        Raises:
            NotFound: there is none of the tenant's.
        """
        return self._files / self.file(tenant, file_id).id / "data"

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises:
        NotFound: there is none of the tenant's.
        """
        _remove(self._files / self.file(tenant, file_id).id)

    # Batches

    def add_batch(
        self,
        tenant: str,
        input_file_id: str,
        *,
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        output_seconds: int | None = None,
        total: int = 0,
    ) -> StoredBatch:
        """Adds a batch; ``total`` is the number of its lines, where it is known.

        Raises:
        NotFound: the tenant has no such file.
        InvalidRequest: the file is no input, or the window has another form.
        Overloaded: the tenant has too many open batches.
        StorageFull: the disk is full.
        """
        seconds = window_seconds(window)
        try:
            file = self.file(tenant, input_file_id)
        except NotFound as error:
            raise NotFound(error.message, "input_file_id") from None
        if file.purpose != "batch":
            raise InvalidRequest(
                f"The file's purpose is {file.purpose}, not batch.", "input_file_id"
            )
        if sum(not batch.ended for batch in self.batches(tenant)) >= self.limits.max_open:
            raise Overloaded(f"{self.limits.max_open} batches are open already.")
        now = int(time.time())
        batch = StoredBatch(
            *(new_batch_id(), tenant, endpoint, input_file_id, window, now, now + seconds),
            output_id=new_file_id(),
            error_id=new_file_id(),
            metadata=metadata,
            output_seconds=output_seconds,
            total=total,
        )
        with _storing(self._batches, batch.id) as folder:
            _link(self._files / file.id / "data", folder / "input.jsonl")
            _write_json(folder / "batch.json", asdict(batch))
        return batch

    def batch(self, tenant: str, batch_id: str) -> StoredBatch:
        """Raises:
        NotFound: there is none of the tenant's.
        """
        if BATCH_ID.fullmatch(batch_id):
            batch = self._read_batch(self._batches / batch_id)
            if batch is not None and batch.tenant == tenant:
                return batch
        raise NotFound(f"No batch found with id '{batch_id[:64]}'.", "batch_id")

    def batches(self, tenant: str | None = None) -> list[StoredBatch]:
        """The tenant's, or all; the newest first."""
        paths, ended, stored = _entries(self._batches), self._ended, []
        for path in paths:
            batch = ended.get(path.name) or self._read_batch(path)
            if batch is not None:
                stored.append(batch)
        self._ended = {batch.id: batch for batch in stored if batch.ended}
        batches = [batch for batch in stored if tenant in (None, batch.tenant)]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def cancel(self, tenant: str, batch_id: str) -> StoredBatch:
        """Asks the worker to cancel the batch.

        Raises:
            NotFound: there is none of the tenant's.
            InvalidRequest: it has ended.
        """
        batch = self.batch(tenant, batch_id)
        if batch.ended:
            raise InvalidRequest(f"Cannot cancel a batch with status '{batch.status}'.", "batch_id")
        with _disk():
            (self._batches / batch.id / "cancel").touch()
            sync_folder(self._batches / batch.id)
        return self.batch(tenant, batch_id)

    def _read_batch(self, path: Path) -> StoredBatch | None:
        value = _read_json(path / "batch.json")
        if value is None:
            return None
        batch = StoredBatch(**value)
        with suppress(FileNotFoundError):
            asked = (path / "cancel").stat().st_mtime
            if not batch.ended:
                batch.status = "cancelling"
                batch.times.setdefault("cancelling", int(asked))
        return batch

    # The worker's

    def lease(self, batch_id: str) -> "BatchLease | None":
        """The batch, if no other worker has it and it has not ended."""
        path = self._batches / batch_id
        try:
            lock = (path / "lock").open("ab")
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        value = _read_json(path / "batch.json")
        if value is None or (batch := StoredBatch(**value)).ended:
            lock.close()
            return None
        return BatchLease(path, batch, lock, self)

    def publish(self, source: Path, file: StoredFile) -> None:
        """Makes a batch's answers a file, once, however often it is called."""
        if (self._files / file.id).exists():
            return
        with _storing(self._files, file.id) as folder:
            _link(source, folder / "data")
            file.bytes = source.stat().st_size
            _write_json(folder / "meta.json", asdict(file))

    def sweep(self) -> None:
        """Removes files and batches whose time is over, and what broken uploads have left."""
        now = time.time()
        for path in _entries(self._files):
            value = _read_json(path / "meta.json")
            if value is not None and (value["expires_at"] or now) < now:
                _remove(path)
        for path in _entries(self._batches):
            value = _read_json(path / "batch.json")
            if value is not None and StoredBatch(**value).ended:
                if path.stat().st_mtime + self.limits.retention < now:
                    _remove(path)
        for folder in (self._files, self._batches):
            for path in folder.glob(f"{TEMPORARY}*"):
                with suppress(OSError):
                    if path.stat().st_mtime + UPLOAD_STALE_SECONDS < now:
                        shutil.rmtree(path, ignore_errors=True)


class BatchLease:
    """A batch that this process works on; no other can, until ``close`` or its end."""

    def __init__(self, path: Path, batch: StoredBatch, lock: BinaryIO, folder: BatchFolder) -> None:
        self.batch = batch
        self.input = path / "input.jsonl"
        self.output = path / "output.jsonl"
        self.errors = path / "errors.jsonl"
        self._path = path
        self._lock = lock
        self._folder = folder

    @property
    def cancelled(self) -> bool:
        return (self._path / "cancel").exists()

    def save(self) -> None:
        """Writes the record.

        Raises:
            StorageFull: the disk is full.
        """
        with _disk():
            _write_json(self._path / "batch.json", asdict(self.batch))

    def publish(self) -> None:
        """Makes the answers files of the tenant.

        Raises:
            StorageFull: the disk is full.
        """
        batch, now = self.batch, int(time.time())
        kept, seconds = self._folder.limits.retention, batch.output_seconds
        expires = now + int(kept if seconds is None else seconds)
        for path, file_id, kind in (
            (self.output, batch.output_id, "output"),
            (self.errors, batch.error_id, "error"),
        ):
            if not path.exists() or not path.stat().st_size:
                continue
            name = f"{batch.id}_{kind}.jsonl"
            file = StoredFile(file_id, batch.tenant, name, "batch_output", 0, now, expires)
            self._folder.publish(path, file)
            batch.has_output |= kind == "output"
            batch.has_errors |= kind == "error"

    def clean(self) -> None:
        """The batch has ended: its files are elsewhere."""
        for path in (self.input, self.output, self.errors):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()


@contextmanager
def _disk() -> Iterator[None]:
    """Raises:
    StorageFull: for an error that says so.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull("The disk of --batch-dir is full.") from error
        raise


@contextmanager
def _storing(folder: Path, name: str) -> Iterator[Path]:
    """A new folder that gets its name at the end, or is removed."""
    temporary = folder / f"{TEMPORARY}{uuid.uuid4().hex}"
    with _disk():
        temporary.mkdir()
        try:
            yield temporary
            sync_folder(temporary)
            os.rename(temporary, folder / name)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(folder)


def _remove(path: Path) -> None:
    """Removes a folder: it is gone at once, whatever happens while its files are removed."""
    gone = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """The same bytes under a second name; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        shutil.copyfile(source, target)


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(TEMPORARY)]


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def _read_json(path: Path) -> Any:
    """The record, or None if it is not there."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None

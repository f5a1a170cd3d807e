"""Names a model by what its files hold, not by where they lie or when they were written."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rayfin.actors.model_files.shards import INDEX, SINGLE, Shards, read_header, read_index

BLOCK = 4 << 20

BESIDE = ("*.json", "*.py", "*.jinja")
"""Files that decide, beside the weights, what a model computes."""

NO_PART = ("generation_config.json", INDEX, "tokenizer*", "vocab*", "merges*", "special_tokens*")
"""Those among them that decide no number of a model: tokens come as ids."""


def tensors_digest(files: Iterable[Path]) -> str:
    """Computes SHA-256 in hex over name, dtype, shape and BLAKE2b of each tensor, sorted by name.

    It is the same for any way to cut the tensors into files. Copies that do not count are left out.
    All cores read, a second for a GiB or less.

    Raises:
        InvalidConfig: the index cannot be read.
        OSError, ValueError: a file cannot be read.
    """
    paths = sorted(files)
    shards = Shards(paths)
    threads = max(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, 1)
    with ThreadPoolExecutor(threads) as pool:
        each = [
            (name, entry["dtype"], entry["shape"], pool.submit(_bytes_digest, path, start, end))
            for path in paths
            for name, entry, start, end in _tensors(path)
            if shards.counts(name, path)
        ]
        return digest_of((name, kind, shape, future.result()) for name, kind, shape, future in each)


def digest_of(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Computes the digest of tensors given as name, dtype, shape and BLAKE2b of the bytes."""
    listed = sorted([name, kind, list(shape), digest] for name, kind, shape, digest in tensors)
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _tensors(path: Path) -> Iterator[tuple[str, dict[str, Any], int, int]]:
    """Yields name, header entry, and first and last byte in the file of each tensor."""
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    for name, entry in read_header(path).items():
        first, last = entry["data_offsets"]
        yield name, entry, begin + first, begin + last


def _bytes_digest(path: Path, start: int, end: int) -> str:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        file.seek(start)
        while start < end and (block := file.read(min(BLOCK, end - start))):
            digest.update(block)
            start += len(block)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Lists the safetensors files that a model is read from."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    named = {folder / name for name in read_index(folder).values()}
    return sorted(named or folder.glob("*.safetensors"))


def small_files(folder: Path) -> list[Path]:
    """Lists the files that decide, beside the weights, what a model computes."""
    beside = {path for pattern in BESIDE for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in beside if not any(path.match(name) for name in NO_PART))


def folder_digest(folder: Path, *, weights: bool = True) -> str:
    """Computes a digest of a model's folder: its tensors and what decides the numbers made of them.

    Raises:
        InvalidConfig, OSError, ValueError: as ``tensors_digest``.
    """
    small = [
        [path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in small_files(folder)
    ]
    tensors = tensors_digest(weight_files(folder)) if weights else None
    return hashlib.sha256(json.dumps([small, tensors]).encode()).hexdigest()

"""Whether a version fits the model that an engine serves: names, shapes, dtypes, numbers."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.model_files.shards import Shards, read_header
from rayfin.actors.runner.speculation.head_folder import draft_files
from rayfin.actors.weights.drafts import PREFIX, DraftNames
from rayfin.actors.weights.writer import FILLER, SIZES

CHUNK = 1 << 20
"""Numbers that are looked at together."""

Wanted = Iterator[tuple[str, str, Sequence[int]]]
"""The model's name of a tensor, the version's, and its shape."""


def headers_of(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What ``files`` say of each of their tensors.

    Raises:
        InvalidRequest: one of them is torn, or no safetensors file.
    """
    shards, headers = Shards(files), dict[str, dict[str, Any]]()
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass  # it compares the header with the file's size
            header = read_header(path)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"weights: {path.name} cannot be read: {error}", "path") from None
        headers |= {name: entry for name, entry in header.items() if shards.counts(name, path)}
    return {name: entry for name, entry in headers.items() if not name.startswith(FILLER)}


def check_names(
    wanted: Wanted, given: Mapping[str, Mapping[str, Any]], base: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Compares names, shapes and dtypes; returns tensors of the ``base`` that stay as they are.

    Raises:
        InvalidRequest: one is missing, unknown, or of another shape or dtype.
    """
    used, missing = set[str](), list[str]()
    for name, stored, shape in wanted:
        if (entry := given.get(stored)) is None:
            missing.append(name)
            continue
        used.add(stored)
        if list(entry["shape"]) != list(shape):
            raise InvalidRequest(
                f"weights: {stored} is {entry['shape']}, and the model's is {list(shape)}", stored
            )
    if missing:
        raise InvalidRequest(
            f"weights lack {len(missing)} of the model's tensors, {missing[0]} among them; "
            "partial=true leaves them as they are",
            missing[0],
        )
    for name, entry in given.items():
        if name not in used and name not in base:
            raise InvalidRequest(f"weights: the model has no {name}", name)
        stored_as = base.get(name, {}).get("dtype")
        if entry["dtype"] not in SIZES and entry["dtype"] != stored_as:
            kind = entry["dtype"]
            raise InvalidRequest(f"weights: {name} is {kind}, not F32, F16 or BF16", name)
    return sorted(base.keys() - given.keys() - used)


def check_drafts(given: Mapping[str, Mapping[str, Any]], args: EngineArgs) -> list[str]:
    """Compares tensors of a draft model or head, which are behind ``PREFIX``, with its folder.

    Returns:
        Those that stay as they are.

    Raises:
        InvalidRequest: one is unknown, or of another shape or dtype.
    """
    names = DraftNames(args)
    headers = headers_of(draft_files(args)) if names.apart else {}
    known = {PREFIX + name: entry for name, entry in headers.items()}
    for name, entry in given.items():
        if name not in known:
            raise InvalidRequest(f"weights: nothing that drafts here has a {name}", name)
        if list(entry["shape"]) != list(known[name]["shape"]):
            raise InvalidRequest(
                f"weights: {name} is {entry['shape']}, not {known[name]['shape']}", name
            )
        if entry["dtype"] not in SIZES and entry["dtype"] != known[name]["dtype"]:
            raise InvalidRequest(f"weights: {name} is {entry['dtype']}, not F32, F16 or BF16", name)
    return sorted(known.keys() - given.keys())


def check_finite(files: Sequence[Path]) -> None:
    """Looks at all numbers of floating point.

    Raises:
        InvalidRequest: one is infinite, or none.
    """
    with ThreadPoolExecutor() as pool:
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    tensor = file.get_tensor(name)
                    if not tensor.is_floating_point():
                        continue
                    chunks = tensor.reshape(-1).split(CHUNK)
                    if not all(pool.map(_is_finite, chunks)):
                        raise InvalidRequest(f"weights: {name} has numbers that are none", name)


def _is_finite(numbers: torch.Tensor) -> bool:
    whole = numbers.float() if numbers.element_size() == 1 else numbers  # torch asks no codes
    # A sum is read as fast as memory, and is finite only where all of its numbers are.
    return bool(whole.sum().isfinite() or whole.isfinite().all())

"""Which file of a checkpoint each tensor is read from: the one that the index names.

A folder may hold a tensor twice: a shard that was written again, or a whole copy under other names.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of all weights, or that which says where each tensor lies."""


class Shards:
    """Says which of the tensors in ``files`` count; the index lies beside them, if there is one.

    Raises:
        InvalidConfig: the index cannot be read.
    """

    def __init__(self, files: Iterable[Path | str]) -> None:
        paths = [Path(file) for file in files]
        # Where there is one file for all weights, transformers does not look at the index.
        whole = not paths or any(path.name == SINGLE for path in paths)
        self._places = {} if whole else read_index(paths[0].parent)

    def counts(self, name: str, file: Path | str) -> bool:
        """Whether a tensor is read from ``file``: the index names that file for it, or none."""
        return self._places.get(name, Path(file).name) == Path(file).name


def read_index(folder: Path) -> dict[str, str]:
    """Reads the name of the file of each tensor; empty if the folder has no index.

    Raises:
        InvalidConfig: it cannot be read.
    """
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        places: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"{path} has no readable weight_map ({error!r})", "model") from None


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Reads what a safetensors file says of each tensor: ``dtype``, ``shape`` and ``data_offsets``.

    The offsets are counted from the end of the header.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    with path.open("rb") as file:
        length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
        if length > size - 8:
            raise ValueError(f"its header of {length} bytes is longer than the file")
        try:
            header: Any = json.loads(file.read(length))
        except RecursionError:
            raise ValueError("its header is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            first, last = entry["data_offsets"]
            lies_there = 0 <= first <= last <= size - 8 - length
        except (KeyError, TypeError):
            lies_there = False
        if not lies_there:
            raise ValueError(f"{name[:128]} does not lie in the file")
    tensors: dict[str, dict[str, Any]] = header
    return tensors


def place_in_index(model: str, name: str) -> str:
    """What the index of a local folder says of a tensor, in brackets; "" where it says nothing."""
    file = read_index(Path(model)).get(name)
    return "" if file is None else f" ({INDEX} places it in {file})"


def require_safetensors(model: str) -> None:
    """Raises unless a local folder holds weights in safetensors form, all that the index names.

    Raises:
        InvalidConfig: the folder holds no safetensors file, or a shard is missing.
    """
    folder = Path(model)
    if not folder.is_dir():
        return
    if not any(folder.glob("*.safetensors")):
        if (why := why_ctranslate2(folder)) is not None:
            raise InvalidConfig(why, "model")
        raise InvalidConfig(
            f"{model} holds no .safetensors file; Rayfin loads no pickled weights", "model"
        )
    if (folder / SINGLE).is_file():
        return
    for name in sorted(set(read_index(folder).values())):
        if not (folder / name).is_file():
            raise InvalidConfig(f"{INDEX} of {model} names {name}, which is not there", "model")


def why_ctranslate2(folder: Path) -> str | None:
    """Words about a folder of CTranslate2, as faster-whisper reads it; None: it is none."""
    if not (folder / "model.bin").is_file():  # pickled weights have another name
        return None
    return (
        f"{folder} is a model of CTranslate2 (model.bin): give the checkpoint that it was made of, "
        "with its weights in safetensors, such as openai/whisper-tiny"
    )

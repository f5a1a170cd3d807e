"""The two files of a peft folder, and the digest by which every engine knows them."""

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import InvalidRequest, NotFound

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHT_BYTES = 4 << 30
PARAM = "lora_path"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

INVALID_ADAPTER = "invalid_adapter"
"""The code of an adapter that cannot be served."""


def invalid(message: str) -> InvalidRequest:
    """The error of an adapter whose files cannot be served."""
    return InvalidRequest(message, PARAM, INVALID_ADAPTER)


@dataclass(frozen=True)
class AdapterFiles:
    """The content of an adapter's folder."""

    config: dict[str, Any]
    weights: bytes  # in the format of safetensors
    folder: str = ""  # that they were read from

    @cached_property
    def digest(self) -> str:
        """SHA-256 of both files in hex; neither name, path nor the order of keys is part of it."""
        canonical = json.dumps(self.config, sort_keys=True, separators=(",", ":")).encode()
        whole = hashlib.sha256(len(canonical).to_bytes(8, "big") + canonical)
        whole.update(self.weights)
        return whole.hexdigest()


def read_folder(path: str) -> AdapterFiles:
    """Reads a folder that peft has written, or the repository of that name on Hugging Face.

    Raises:
        NotFound: there is neither, or no adapter_config.json in it.
        InvalidRequest: a file that is not readable, too large or no JSON object.
    """
    folder = Path(path)
    try:
        if not folder.is_dir():
            folder = _from_hub(path)
        if not (folder / CONFIG).is_file():
            raise NotFound(f"No adapter at {path[:256]!r}: it has no {CONFIG}.", PARAM)
        config = _read(folder / CONFIG, MAX_CONFIG_BYTES)
        if not (folder / WEIGHTS).is_file():
            also = f"; {PICKLED} can run code and is not read" if _pickled(folder) else ""
            raise invalid(f"{WEIGHTS} is missing{also}.")
        weights = _read(folder / WEIGHTS, MAX_WEIGHT_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise invalid(f"The adapter cannot be read: {error}.") from error
    return AdapterFiles(_parse(config), weights, str(folder))


def _from_hub(name: str) -> Path:
    """The folder with the two files of a repository on Hugging Face, or in its cache.

    Raises:
        NotFound: there is no such repository, no access to it, or no network.
        InvalidRequest: it is too large, which is known before it is fetched.
    """
    missing = f"No adapter at {name[:256]!r}: there is no such folder"
    if HUB_NAME.fullmatch(name) is None:
        raise NotFound(f"{missing}.", PARAM)
    # Only where a name is one.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    files = [CONFIG, WEIGHTS]
    try:
        with suppress(DryRunError):  # without a network; the cache may have it
            for file in snapshot_download(name, allow_patterns=files, dry_run=True):
                _require_size(file.filename, file.file_size or 0, MAX_WEIGHT_BYTES)
        return Path(snapshot_download(name, allow_patterns=files))
    except InvalidRequest:
        raise
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise NotFound(f"{missing}, and Hugging Face does not give it: {why}", PARAM) from error


def read_ref(ref: AdapterRef) -> AdapterFiles:
    """Reads the files that ``ref`` names by path, if they are still the same.

    Raises:
        NotFound, InvalidRequest: as ``read_folder``, or the content has changed.
    """
    files = read_folder(ref.path)
    if files.digest != ref.digest:
        raise invalid(f"The files of adapter {ref.name!r} have changed since it was loaded.")
    return files


def _pickled(folder: Path) -> bool:
    return (folder / PICKLED).is_file()


def _read(path: Path, limit: int) -> bytes:
    _require_size(path.name, path.stat().st_size, limit)
    return path.read_bytes()


def _require_size(name: str, size: int, limit: int) -> None:
    if size > limit:
        raise invalid(f"{name} has {size} bytes; at most {limit} are read.")


def _parse(text: bytes) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{CONFIG} is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise invalid(f"{CONFIG} must hold an object.")
    return config

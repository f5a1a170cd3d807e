"""The folder of a head: found or fetched, its config.json and its weights."""

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.shards import INDEX, Shards
from rayfin.actors.weights.sources import base_files

FIELD = "speculative_config"


def find_head(name: str, args: EngineArgs) -> Path:
    """The folder of a head, which may have to be fetched from the Hub.

    Raises:
        InvalidConfig: there is none.
    """
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")):
            raise InvalidConfig(f"{FIELD} model: there is no folder {name}", FIELD)
        try:
            files = ["config.json", "*.safetensors", INDEX]
            snapshot = snapshot_download(name, allow_patterns=files, cache_dir=args.download_dir)
        except (OSError, ValueError) as error:
            first = (str(error).strip().splitlines() or ["unknown error"])[0]
            raise InvalidConfig(f"{FIELD} model: cannot load {name!r}: {first}", FIELD) from None
        folder = Path(snapshot)
    return folder


def draft_files(args: EngineArgs) -> list[Path]:
    """Returns the files of the draft model or head that has a folder; none if none has.

    Raises:
        InvalidConfig: there is no such folder.
    """
    settings = args.speculation
    if args.draft_model is not None:
        return base_files(args.draft_model)
    if settings is None or settings.model is None:
        return []
    return sorted(find_head(settings.model, args).glob("*.safetensors"))


def read_json(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        InvalidConfig: there is none, or it cannot be read.
    """
    try:
        said: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        refuse(folder, f"has no readable config.json ({type(error).__name__})")
    return said


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of the folder by their names.

    Raises:
        InvalidConfig: there is no safetensors file, or one is broken.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        refuse(folder, "holds no .safetensors file; Rayfin loads no pickled weights")
    weights: dict[str, torch.Tensor] = {}
    shards = Shards(files)
    try:
        for file in files:
            held = load_file(file)
            weights |= {name: held[name] for name in held if shards.counts(name, file)}
    except (OSError, SafetensorError) as error:
        refuse(folder, f"cannot be read: {error}")
    return weights


def require_fitting(folder: Path, config: Any, target: Any) -> None:
    """Raises unless a head of ``config`` is for a model of the configuration ``target``.

    Raises:
        InvalidConfig: sizes differ.
    """
    for name in ("vocab_size", "hidden_size"):
        size, other = getattr(config, name), getattr(target, name)
        if size != other:
            refuse(folder, f"has {name} {size}, and the model has {other}: it is another model's")


def refuse(folder: Path, why: str) -> NoReturn:
    """Raises what says that the folder's head cannot be used.

    Raises:
        InvalidConfig: always.
    """
    raise InvalidConfig(f"{FIELD} model: {folder} {why}", FIELD)

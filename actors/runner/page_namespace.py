"""Names all that decides the bits of a page, but the tokens: see ``cache/page_files.py``."""

import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import torch

from rayfin.actors.code_version import code_version
from rayfin.actors.config import DECIDE_TOKENS, EngineArgs
from rayfin.actors.errors import InvalidConfig, RayfinError
from rayfin.actors.model_files.digests import folder_digest, small_files, weight_files
from rayfin.actors.model_files.files import find_file
from rayfin.actors.processes.environment import at_low_priority
from rayfin.kernels.cpu.stored import layout

if TYPE_CHECKING:
    from rayfin.actors.runner.loading import LoadedModel

logger = logging.getLogger(__name__)

PLACES = ("model", "tokenizer", "revision", "tokenizer_revision")
"""Settings that say where files are; their content counts."""


def page_namespace(args: EngineArgs, loaded: "LoadedModel") -> str:
    """A digest of the model's content, the settings, the layout of a page and the code; "" where
    pages are not all that a prefix leaves behind, so that files of them would not do.

    The model counts by its tensors and its small files, wherever they lie: engines on several
    machines share pages, and other weights at the same place do not.

    Raises:
        InvalidConfig: a file of the model cannot be read.
    """
    if loaded.whole_prompts or not loaded.model.layouts:
        return ""
    if loaded.peers is not None and loaded.peers.place.rank > 0:
        return ""  # the first rank reads the files for all of them
    dummy, drafts = args.load_format == "dummy", args.speculation
    models = [_content(*model, weights=not dummy) for model in _models(args)]
    if models[0] is None:
        raise InvalidConfig(f"{args.model} has no config.json", "model")
    decide = [name for name in DECIDE_TOKENS if name not in PLACES]
    depends = {
        "code": code_version(),
        "libraries": [torch.__version__, version("transformers")],
        "kernels": None if loaded.kernels is None else layout(),
        "models": models,
        "settings": {name: str(getattr(args, name)) for name in (*decide, "attention")},
        "drafts": None if drafts is None else asdict(drafts) | {"model": None},
        "device": _device(loaded.device),
        "pages": [args.page_size, str(loaded.page_type), *map(str, loaded.model.layouts)],
        "states": [] if loaded.recurrent is None else [*map(str, loaded.recurrent.layouts)],
        "ranks": [args.tensor_parallel_size, args.pipeline_parallel_size],
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]


class PageNaming:
    """The namespace of a loaded model, read when another engine asks first.

    A model that is written anew meanwhile is another one than that in memory, whose pages then are
    those of no other engine. Any thread may ask.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._files = self._written()
        self._name: str | None = None
        self._lock = threading.Lock()

    def name(self, loaded: "LoadedModel") -> str:
        """Returns it; it takes as long as to read the model, once."""
        with self._lock:
            if self._name is None:
                self._name = at_low_priority(lambda: self._read(loaded))
            return self._name

    def _read(self, loaded: "LoadedModel") -> str:
        try:
            name = page_namespace(self._args, loaded)
            if self._files and self._written() == self._files:
                return name
            why = "its files are others than those that were loaded"
        except RayfinError as error:
            why = str(error)
        logger.warning("%s has no pages in common with other engines: %s", self._args.model, why)
        return token_hex()

    def _written(self) -> list[tuple[str, int, int, int]]:
        """The model's files, with inode, size and time; none if they cannot be read."""
        files = []
        try:
            for model, hub in _models(self._args):
                if (config := find_file(model, "config.json", **hub)) is not None:
                    for path in (*small_files(config.parent), *weight_files(config.parent)):
                        status = path.stat()
                        of_file = status.st_ino, status.st_size, status.st_mtime_ns
                        files.append((str(path), *of_file))
        except (OSError, RayfinError):
            return []
        return files


def _models(args: EngineArgs) -> list[tuple[str, Mapping[str, Any]]]:
    """The model and that of its drafts, each with what finds it on the Hub."""
    models: list[tuple[str, Mapping[str, Any]]] = [(args.model, args.hub)]
    if args.speculation is not None and args.speculation.model is not None:
        models.append((args.speculation.model, {"cache_dir": args.download_dir}))
    return models


def _content(model: str, hub: Mapping[str, Any], *, weights: bool) -> str | None:
    config = find_file(model, "config.json", **hub)
    if config is None:
        return None
    try:
        return folder_digest(config.parent, weights=weights)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{model} cannot be read: {error}", "model") from None


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

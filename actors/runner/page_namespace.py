"""Names all that decides the bits of a page, but the tokens: see ``cache/page_files.py``."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from rayfin.actors.code_version import code_version
from rayfin.actors.config import DECIDE_TOKENS, EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.digests import folder_digest
from rayfin.actors.model_files.files import find_file
from rayfin.kernels.cpu.stored import layout

if TYPE_CHECKING:
    from rayfin.actors.runner.loading import LoadedModel


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
    if loaded.recurrent is not None or loaded.whole_prompts or not loaded.model.layouts:
        return ""
    if loaded.peers is not None and loaded.peers.place.rank > 0:
        return ""  # the first rank reads the files for all of them
    dummy, drafts = args.load_format == "dummy", args.speculation
    models = [_content(args.model, args.hub, weights=not dummy)]
    if drafts is not None and drafts.model is not None:
        where = {"cache_dir": args.download_dir}
        models.append(_content(drafts.model, where, weights=not dummy))
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
        "ranks": [args.tensor_parallel_size, args.pipeline_parallel_size],
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]


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

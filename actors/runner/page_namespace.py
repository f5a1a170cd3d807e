"""Names all that decides the bits of a page, but the tokens: see ``cache/page_files.py``."""

import hashlib
import json
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from rayfin.actors.code_version import code_version
from rayfin.actors.config import DECIDE_TOKENS, EngineArgs
from rayfin.actors.model_files.files import find_file
from rayfin.kernels.cpu.stored import layout

if TYPE_CHECKING:
    from rayfin.actors.runner.loading import LoadedModel


def page_namespace(args: EngineArgs, loaded: "LoadedModel") -> str:
    """A digest of the model's files, the settings, the layout of a page and the code; "" where
    pages are not all that a prefix leaves behind, so that files of them would not do.

    A file of the model counts by name, size and time: to read it all would take as long as a load.
    """
    if args.kv_disk_path is None:
        return ""
    if loaded.recurrent is not None or loaded.whole_prompts or not loaded.model.layouts:
        return ""
    config = find_file(args.model, "config.json", **args.hub)
    files = [] if config is None else sorted(config.parent.iterdir())
    states = [(path.name, path.stat()) for path in files if path.is_file()]
    depends = {
        "code": code_version(),
        "libraries": [torch.__version__, version("transformers")],
        "kernels": None if loaded.kernels is None else layout(),
        "files": [[name, state.st_size, state.st_mtime_ns] for name, state in states],
        "settings": {name: str(getattr(args, name)) for name in (*DECIDE_TOKENS, "attention")},
        "drafts": str(args.speculation),
        "device": _device(loaded.device),
        "pages": [args.page_size, str(loaded.page_type), *map(str, loaded.model.layouts)],
        "ranks": [args.tensor_parallel_size, args.pipeline_parallel_size],
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

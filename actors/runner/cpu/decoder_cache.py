"""The decoder of one engine's settings in a cache of weights (``--weights-cache``).

What is kept has been compared with transformers when it was made, and its key has all that it
follows from. So a start that finds it reads no checkpoint, makes no transformers model, packs
nothing and compares nothing; it gives the same bits.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from rayfin.actors.code_version import code_version
from rayfin.actors.config import EngineArgs
from rayfin.actors.runner.cpu.array_file import Array
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.cpu.stored_config import StoredConfig
from rayfin.actors.runner.cpu.stored_decoder import restored, store
from rayfin.actors.runner.cpu.weights_cache import WeightsCache
from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.cpu.stored import layout

logger = logging.getLogger(__name__)

DECIDE_WEIGHTS = ("dtype", "quantization", "activations", "attention", "language_model_only")
"""The settings that decide what a decoder is made of, beside the model's files and its config."""

SAFE_WEIGHTS, SAFE_WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
"""The files that transformers reads weights from: one of them, with those that an index names."""


UNASKED_MODEL, UNASKED_BYTES, UNASKED_SHARE = 4 << 30, 8 << 30, 2
"""What is kept in a folder that no setting names: models of so many bytes at most, so many bytes in
all, on a part of the disk's free space. Models among temporary files come once."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What loading has found out about a model, beside its decoder."""

    parameters: int
    int4_saves: int  # bytes of weights that quantization "int4" would free
    config: StoredConfig


class DecoderCache:
    """The place of one decoder among packed weights."""

    def __init__(self, weights: WeightsCache, key: str, folder: Path) -> None:
        self._weights, self._key, self._folder = weights, key, folder

    @classmethod
    def of(
        cls,
        args: EngineArgs,
        device: torch.device,
        config: Mapping[str, Any],
        *,
        media: bool = False,
    ) -> "DecoderCache | None":
        """The place of what these settings load; None, with a line, where it is not kept.

        Args:
            config: the values of the model's configuration.
            media: the model reads images, or hears.
        """
        place = args.weights_folder
        if place is None:
            return None
        why, kernels, folder = _why_not(args, device, media=media), layout(), _folder(args)
        if why is None and kernels is None:
            why = "without compiled kernels none are packed"
        files = None if folder is None else _files(folder)
        if why is None and files is None:
            why = f"{args.model} is not on this disk yet"
        max_bytes = int(args.weights_cache_gb * 2**30)
        if not args.names_weights_folder:
            max_bytes = min(max_bytes, _room(place))
            why = why or _why_not_unasked(files or [], max_bytes)
        if why is not None or folder is None or files is None:
            level = logging.INFO if args.names_weights_folder else logging.DEBUG
            logger.log(level, "no weights are cached: %s", why)
            return None
        weights = WeightsCache(place, max_bytes)
        depends = {
            "kernels": kernels,
            "code": code_version(),
            "libraries": [torch.__version__, version("transformers")],
            "settings": [str(getattr(args, name)) for name in DECIDE_WEIGHTS],
            "config": {**config, "_name_or_path": None},
        }
        try:
            return cls(weights, weights.key(files, depends), folder)
        except OSError as error:
            logger.warning("no weights are cached: %s", error)
            return None

    def find(
        self, make_kernels: Callable[[int], CpuKernels | None]
    ) -> tuple[CpuDecoder, CpuKernels, Facts] | None:
        """The decoder over mapped weights, or None; ``make_kernels`` is given its parameters."""
        entry = self._weights.find(self._key)
        return None if entry is None else self._restored(entry, make_kernels)

    def holds(self) -> bool:
        """Whether the decoder is there; ``find`` may still see that its file is broken."""
        return self._weights.holds(self._key)

    def follows(self, args: EngineArgs) -> bool:
        """Whether the model's name still leads to the files that this place was named after.

        A load asks the Hub again, and gets what has been pushed there since.
        """
        return _folder(args) == self._folder

    def keep(self, model: Any, kernels: CpuKernels, facts: Facts, positions: int | None) -> Any:
        """Keeps a decoder of ``positions``, and gives it over the file, which processes share.

        Any other model, or one that cannot be kept, stays as it is.
        """
        stored = store(model, positions) if isinstance(model, CpuDecoder) else None
        if stored is None:
            logger.info("no weights are cached: the model is not fused as a whole, or without end")
            return model
        meta, arrays = stored
        if not self._weights.keep(self._key, {"decoder": meta, "facts": asdict(facts)}, arrays):
            return model
        restored = self.find(lambda _: kernels)
        return model if restored is None else restored[0]

    def _restored(
        self,
        entry: tuple[dict[str, Any], list[Array]],
        make_kernels: Callable[[int], CpuKernels | None],
    ) -> tuple[CpuDecoder, CpuKernels, Facts] | None:
        meta, arrays = entry
        try:
            held = dict(meta["facts"])
            facts = Facts(**held | {"config": StoredConfig(**held["config"])})
            kernels = make_kernels(facts.parameters)
            if kernels is None:
                return None
            return restored(kernels, (meta["decoder"], arrays)), kernels, facts
        except (KeyError, TypeError, ValueError) as error:
            self._weights.drop(self._key, f"it holds no decoder ({error})")
            return None


def _why_not(args: EngineArgs, device: torch.device, *, media: bool) -> str | None:
    if device.type != "cpu":
        return f"the device is {device.type!r}"
    if args.load_format == "dummy":
        return "they are drawn at random"
    if args.serves_adapters:
        return "adapters find their layers in the model itself"
    if media:
        return "the model reads more than text"
    if args.enable_prompt_embeds:
        return "embeddings of prompts are compared with the model itself"
    if args.trust_remote_code:
        return "code of the model's own may change them"
    return None


def _room(folder: Path) -> int:
    """Returns the bytes that the folder may have unasked; none where it cannot be made."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        return 0
    return min(UNASKED_BYTES, shutil.disk_usage(there).free // UNASKED_SHARE)


def _why_not_unasked(files: list[Path], room: int) -> str | None:
    temporary = Path(tempfile.gettempdir()).resolve()
    if any(temporary in path.absolute().parents for path in files):
        return "it is a temporary file"
    size = sum(path.stat().st_size for path in files)
    if size <= min(UNASKED_MODEL, room):
        return None
    return f"{size / 2**30:.1f} GiB are too many for the default folder; --weights-cache names one"


def _folder(args: EngineArgs) -> Path | None:
    """Where the model's files are on this disk."""
    if Path(args.model).is_dir():
        return Path(args.model)
    # Not snapshot_download: it wants all files of a repository, and a load fetches what it reads.
    try:
        path = try_to_load_from_cache(args.model, "config.json", **args.hub)
    except ValueError:  # no name of the Hub's
        return None
    return Path(path).parent if isinstance(path, str) else None


def _files(folder: Path) -> list[Path] | None:
    """The files of a checkpoint's weights; None unless all that transformers reads are there.

    The Hub's cache has a folder as soon as it has one file of a model. What is named after a part
    of the files would be taken for any other model with the same part.
    """
    paths = {path for end in ("*.safetensors", "*.index.json") for path in folder.glob(end)}
    index = folder / SAFE_WEIGHTS_INDEX
    if index in paths:
        try:
            paths |= {
                folder / str(name) for name in json.loads(index.read_text())["weight_map"].values()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    elif folder / SAFE_WEIGHTS not in paths:
        return None
    return sorted(paths) if all(path.is_file() for path in paths) else None

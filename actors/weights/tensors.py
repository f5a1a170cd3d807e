"""A trainer's tensors, as a file of the store."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.model_files.digests import tensors_digest
from rayfin.actors.model_files.shards import SINGLE
from rayfin.actors.weights.drafts import PREFIX, DraftNames
from rayfin.actors.weights.sources import base_files
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.version import WeightVersion
from rayfin.actors.weights.writer import TensorWriter

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

PREFIXES = ("_orig_mod.", "module.", "base_model.model.")
INSIDE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers of trainers put into names: torch.compile, DDP, PEFT, FSDP, checkpointing."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def plain_name(name: str) -> str:
    """A tensor's name without what wrappers add."""
    for inside in INSIDE:
        name = name.replace(inside, "")
    while prefixes := [prefix for prefix in PREFIXES if name.startswith(prefix)]:
        name = name.removeprefix(prefixes[0])
    return name


def add_tensor(
    writer: TensorWriter, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Appends a tensor, rounded to ``dtype`` if that is given.

    Raises:
        InvalidRequest: it is none of floating-point numbers, or its name came before.
        StorageFull: there is no room.
    """
    stored = plain_tensor(name, tensor, dtype)
    content = memoryview(stored.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    writer.add(name, NAMES[stored.dtype], tuple(stored.shape), content)


def plain_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of numbers side by side in this machine's memory, rounded to ``dtype`` if given.

    Raises:
        InvalidRequest: it is none of floating-point numbers.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(f"weights: {name} is a {type(tensor).__name__}, no tensor", name)
    stored = tensor.detach()
    if dtype is not None and stored.is_floating_point():
        stored = stored.to(dtype)
    if stored.dtype not in NAMES or stored.is_meta:
        kind = "meta" if stored.is_meta else str(stored.dtype).removeprefix("torch.")
        raise InvalidRequest(f"weights: {name} is {kind}, not float32, float16 or bfloat16", name)
    return stored.to("cpu").contiguous()


def read_tensors(
    files: Iterable[Path], wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of safetensors files whose names are wanted, one at a time.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in filter(wanted, file.keys()):
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError, ValueError) as error:
            raise InvalidRequest(f"weights: {path} cannot be read: {error}", "path") from None


def draft_tensors(version: WeightVersion) -> dict[str, torch.Tensor]:
    """A version's tensors of a draft model or head that has a folder, by the names in there.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    files = [] if version.is_base else version.files
    tensors = read_tensors(files, lambda name: name.startswith(PREFIX))
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors}


@contextmanager
def draft_version(args: EngineArgs, version: WeightVersion) -> Iterator[WeightVersion]:
    """The draft model of ``args`` as a version of its own, which is gone afterwards.

    Args:
        version: of the model that it drafts for; without tensors of the draft model, those of its
            folder are meant.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    tensors = draft_tensors(version)
    if not tensors:
        yield WeightVersion()
        return
    with tempfile.TemporaryDirectory(prefix="rayfin-draft-") as folder:
        path = Path(folder) / SINGLE
        save_file({**dict(read_tensors(base_files(args))), **tensors}, path, {"format": "pt"})
        yield WeightVersion(1, version.label, tensors_digest([path]), str(path))


def tensors_version(
    store: WeightStore,
    tensors: NamedTensors | Mapping[str, torch.Tensor],
    label: str = "",
    *,
    dtype: torch.dtype | None = None,
    names: DraftNames | None = None,
    rest: Iterable[Path] = (),
    partial: bool = False,
) -> WeightVersion:
    """Writes a trainer's tensors into the store.

    Args:
        label: the trainer's name of the version.
        names: of tensors of what drafts; None: there are none.
        rest: files of a version, whose tensors of what drafts stand for those that are left out.
        partial: all of them do; so they do where only tensors of what drafts come.

    Raises:
        InvalidRequest: one of them is no tensor of floating-point numbers, or comes twice.
        StorageFull: there is no room.
    """
    named: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
    writer = store.writer()
    drafted: set[bool] = set()
    try:
        for name, tensor in named:
            stored_name = plain_name(name)
            if names is not None:
                drafted.add(names.is_draft(stored_name))
                if names.is_draft(stored_name) and not tensor.is_floating_point():
                    continue  # EAGLE-3's table of tokens stays
                stored_name = names.stored(stored_name)
            add_tensor(writer, stored_name, tensor, dtype)
        whole = partial or drafted == {True}

        def stays(name: str) -> bool:
            return name not in writer and (whole or name.startswith(PREFIX))

        for name, tensor in read_tensors(rest, stays):
            add_tensor(writer, name, tensor)
        path, digest = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return WeightVersion(0, label, digest, str(path))

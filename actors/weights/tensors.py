"""A trainer's tensors, as a file of the store."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rayfin.actors.errors import InvalidRequest
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
    while (prefix := next((own for own in PREFIXES if name.startswith(own)), None)) is not None:
        name = name.removeprefix(prefix)
    return name


def add_tensor(
    writer: TensorWriter, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Appends a tensor, rounded to ``dtype`` if that is given.

    Raises:
        InvalidRequest: it is none of floating-point numbers, or its name came before.
        StorageFull: there is no room.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(f"weights: {name} is a {type(tensor).__name__}, no tensor", name)
    own = tensor.detach()
    if dtype is not None and own.is_floating_point():
        own = own.to(dtype)
    if own.dtype not in NAMES or own.is_meta:
        kind = "meta" if own.is_meta else str(own.dtype).removeprefix("torch.")
        raise InvalidRequest(f"weights: {name} is {kind}, not float32, float16 or bfloat16", name)
    own = own.to("cpu").contiguous()
    content = memoryview(own.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    writer.add(plain_name(name), NAMES[own.dtype], tuple(own.shape), content)


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of safetensors files, one at a time.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError, ValueError) as error:
            raise InvalidRequest(f"weights: {path} cannot be read: {error}", "path") from None


def tensors_version(
    store: WeightStore,
    tensors: NamedTensors | Mapping[str, torch.Tensor],
    label: str = "",
    *,
    dtype: torch.dtype | None = None,
    rest: Iterable[Path] = (),
) -> WeightVersion:
    """Writes a trainer's tensors into the store.

    Args:
        label: the trainer's name of the version.
        rest: files whose tensors stand for those that are left out.

    Raises:
        InvalidRequest: one of them is no tensor of floating-point numbers, or comes twice.
        StorageFull: there is no room.
    """
    named: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
    writer = store.writer()
    try:
        for name, tensor in named:
            add_tensor(writer, name, tensor, dtype)
        for name, tensor in read_tensors(rest):
            if name not in writer:
                add_tensor(writer, name, tensor)
        path, digest = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return WeightVersion(0, label, digest, str(path))

"""An adapter's files as tensors, checked against the layers of the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rayfin.actors.adapters.files import WEIGHTS, AdapterFiles, invalid
from rayfin.actors.adapters.settings import read_settings
from rayfin.actors.adapters.tensors import Entry, read_pairs
from rayfin.actors.runner.models.indexer import inside_indexers
from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.cpu.low_rank import PackedLowRank

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

LayerSizes = Mapping[str, tuple[int, int]]
"""(inputs, outputs) of the linear layers that may have an adapter, by the module's path."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a layer's output: (x A^T) B^T * scale."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank], of A's dtype
    scale: float

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs] -> [N, outputs], in the dtype of A."""
        return (x.to(self.a.dtype) @ self.a.T) @ self.b.T * self.scale

    @property
    def bytes(self) -> int:
        """Memory of A and B."""
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True)
class Adapter:
    """The pairs of one adapter by the path of their module."""

    digest: str
    layers: Mapping[str, LowRank | PackedLowRank]

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(layer.bytes for layer in self.layers.values())


def layer_sizes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """The sizes of the model's linear layers, without those that are called with other rows.

    Those are its head, and indexers, which choose keys.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    by_path: dict[str, tuple[int, int]] = {}
    left_out = {head, *inside_indexers(model)}
    for path, module in model.named_modules():
        if module in left_out:
            continue
        sizes = _sizes(module)
        if sizes is not None:
            by_path[path] = sizes
    return by_path


def read_adapter(
    files: AdapterFiles,
    sizes: LayerSizes,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: CpuKernels | None = None,
) -> Adapter:
    """The adapter in ``dtype`` on ``device``, packed if there are ``kernels``.

    Raises:
        InvalidRequest: it cannot be served, or not with this model; the message says where.
    """
    settings = read_settings(files.config, max_rank)
    layers: dict[str, LowRank | PackedLowRank] = {}
    for module, pair in read_pairs(files, settings).items():
        if module not in sizes:
            raise invalid(f"{WEIGHTS}: the model has no linear layer {module[:200]!r}.")
        if (pair.inputs, pair.outputs) != sizes[module]:
            raise invalid(
                f"{WEIGHTS}: {module} is for {pair.inputs} inputs and {pair.outputs} outputs; the "
                f"model's layer has {sizes[module][0]} and {sizes[module][1]}."
            )
        a, b = (_tensor(files.weights, entry) for entry in (pair.a, pair.b))
        for entry, tensor in ((pair.a, a), (pair.b, b)):
            if not bool(torch.isfinite(tensor).all()):
                raise invalid(f"{WEIGHTS}: {entry.name} has values that are not finite.")
        a, b, scale = a.to(device, dtype), b.to(device, dtype), settings.scale(module)
        layers[module] = (
            LowRank(a, b, scale) if kernels is None else PackedLowRank(kernels, a, b, scale)
        )
    return Adapter(files.digest, layers)


def _sizes(module: Any) -> tuple[int, int] | None:
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    inputs, outputs = (getattr(module, name, None) for name in ("in_features", "out_features"))
    if not isinstance(module, nn.Module) or not isinstance(inputs, int):
        return None
    return (inputs, outputs) if isinstance(outputs, int) else None


def _tensor(data: bytes, entry: Entry) -> torch.Tensor:
    """A copy of the entry, [*shape]: the bytes are not kept."""
    dtype = DTYPES[entry.dtype]
    flat = torch.frombuffer(bytearray(data[entry.start : entry.end]), dtype=dtype)
    return flat.view(entry.shape)

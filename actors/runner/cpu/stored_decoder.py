"""A fused decoder as plain numbers and arrays, and the same decoder over such arrays again."""

from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch

from rayfin.actors.runner.cpu.array_file import Array
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.models.step_model import Tables
from rayfin.cache.kv_tensors import KVLayout
from rayfin.kernels.cpu.decoder import DecoderLayer, DecoderShape, PackedDecoder
from rayfin.kernels.cpu.kernels import PARTS, Activation, CpuKernels, Matrix
from rayfin.kernels.cpu.stored import describe, restore

MAX_ROTARY_BYTES = 256 << 20
"""A model of more positions than such tables have is not stored."""

Stored = tuple[dict[str, Any], list[Array]]


class _Arrays:
    """The arrays of a decoder; a matrix that is used twice is there once."""

    def __init__(self) -> None:
        self.all: list[Array] = []
        self._matrices: dict[int, dict[str, Any]] = {}

    def add(self, value: Any) -> Any:
        """What stands for ``value`` in JSON."""
        if isinstance(value, torch.Tensor):
            self.all.append(np.ascontiguousarray(value.detach().float().numpy()))
            return {"array": len(self.all) - 1}
        if isinstance(value, Matrix):
            if id(value) not in self._matrices:
                at = len(self.all)
                self.all += value.parts()
                self._matrices[id(value)] = {"matrix": describe(value), "at": at}
            return self._matrices[id(value)]
        return value


def store(decoder: CpuDecoder, positions: int | None) -> Stored | None:
    """The decoder with the rotary tables of ``positions``; None where these have no bound.

    The arrays are the decoder's own memory.
    """
    packed = decoder.packed
    shape = packed.shape
    row = 4 * shape.rotary_dim * (1 + max(layer.rotary for layer in packed.layers))
    if positions is None or positions * row > MAX_ROTARY_BYTES:
        return None
    arrays = _Arrays()
    layers = [
        {field.name: arrays.add(getattr(layer, field.name)) for field in fields(DecoderLayer)}
        for layer in packed.layers
    ]
    names = ("embedding", "head", "final_norm", "head_bias")
    meta = {
        "shape": asdict(shape),
        "layers": layers,
        **{name: arrays.add(getattr(packed, name)) for name in names},
        "layouts": [asdict(layout) for layout in decoder.layouts],
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "rotary": [[arrays.add(part) for part in pair] for pair in decoder.rotate(positions)],
    }
    return meta, arrays.all


def restored(kernels: CpuKernels, stored: Stored) -> CpuDecoder:
    """The decoder; its weights stay where the arrays are.

    Raises:
        KeyError, TypeError, ValueError: the arrays are not of a decoder.
    """
    meta, arrays = stored
    matrices: dict[int, Matrix] = {}

    def value(of: Any) -> Any:
        if isinstance(of, dict) and "array" in of:
            return torch.from_numpy(arrays[of["array"]].copy())
        if isinstance(of, dict):
            at = of["at"]
            if at not in matrices:
                matrices[at] = restore(kernels, of["matrix"], arrays[at : at + PARTS])
            return matrices[at]
        return of

    shape = dict(meta["shape"])
    shape["activation"] = Activation(shape["activation"])
    packed = PackedDecoder(
        kernels,
        DecoderShape(**shape),
        [
            DecoderLayer(**{name: value(of) for name, of in layer.items()})
            for layer in meta["layers"]
        ],
        **{name: value(meta[name]) for name in ("embedding", "head", "final_norm", "head_bias")},
    )
    tables = [(value(cos), value(sin)) for cos, sin in meta["rotary"]]

    def rotate(count: int) -> Tables:
        return [(cos[:count], sin[:count]) for cos, sin in tables]

    layouts = [KVLayout(**layout) for layout in meta["layouts"]]
    return CpuDecoder(packed, rotate, _no_images, layouts, getattr(torch, meta["dtype"]))


def _no_images(_: torch.Tensor) -> Tables:
    raise AssertionError("a model that reads images is not stored")

"""Low-rank adapters beside the projections of a packed decoder (kernels/cpu/layers/lora.h)."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayfin.kernels.cpu.kernels import CpuKernels

PARTS = 3
"""Linear layers of a projection, at most (kLoraParts)."""

BLOCK_ROWS = 12
"""Rows that one thread takes at once, at most: the rows of a register tile with AVX-512, twice
those with AVX2."""


class _Part(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("first", "count")),
        ("scale", ctypes.c_float),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("order", "starts", "adapters")),
        *((name, ctypes.c_int64) for name in ("blocks", "most_rows", "most_rank")),
    ]


class PackedLowRank:
    """scale * B (A x) by the compiled kernels: a row's bits do not depend on the rows beside it."""

    def __init__(
        self,
        kernels: CpuKernels,
        a: torch.Tensor,  # [rank, inputs]
        b: torch.Tensor,  # [outputs, rank]
        scale: float,
    ) -> None:
        self._kernels = kernels
        self.a, self.b, self.scale = kernels.pack([a]), kernels.pack([b]), scale

    @property
    def bytes(self) -> int:
        """Memory of A and B, without the padding of the packed form."""
        matrices = (self.a, self.b)
        return sum(matrix.outputs * matrix.inputs * matrix.storage.itemsize for matrix in matrices)

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inputs] -> [N, outputs] float32."""
        narrow = self._kernels.matmul(x.float().contiguous(), self.a)
        return self._kernels.matmul(narrow, self.b, alpha=self.scale)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a linear layer's outputs lie among those of a projection."""

    path: str  # the layer's
    first: int
    count: int


Places = Sequence[Sequence[Place]]
"""The linear layers of each projection of a decoder, layer after layer."""


class AdapterParts:
    """What one adapter does to each projection of a decoder."""

    def __init__(self, places: Places, layers: Mapping[str, PackedLowRank]) -> None:
        self._kept = layers  # the structs hold addresses
        self._parts = (_Part * (PARTS * len(places)))()
        for index, projection in enumerate(places):
            assert len(projection) <= PARTS
            for number, place in enumerate(projection):
                part = self._parts[PARTS * index + number]
                part.first, part.count = place.first, place.count
                pair = layers.get(place.path)
                if pair is not None:
                    assert pair.b.outputs == place.count
                    part.a, part.b, part.scale = pair.a.handle, pair.b.handle, pair.scale
        self.rank = max((pair.a.outputs for pair in layers.values()), default=0)

    @property
    def address(self) -> int:
        """Of its parts [projections, PARTS]."""
        return ctypes.addressof(self._parts)


class AdapterRows:
    """The rows of a step, grouped by adapter and cut into blocks."""

    def __init__(
        self,
        tables: Sequence[AdapterParts],
        of_row: np.ndarray,  # [R] integers: which of ``tables``, or -1
    ) -> None:
        self._tables = tables  # the struct holds addresses
        self._order = np.argsort(of_row, kind="stable").astype(np.int64)
        counts = np.bincount(of_row.astype(np.int64) + 1, minlength=len(tables) + 1)
        starts: list[int] = [0]
        owners: list[int | None] = []
        for number, count in enumerate(counts.tolist()):
            blocks = -(-count // BLOCK_ROWS)
            first = starts[-1]
            starts += [first + count * block // blocks for block in range(1, blocks + 1)]
            owners += [tables[number - 1].address if number else None] * blocks
        self._starts = np.array(starts, np.int64)
        self._owners = (ctypes.c_void_p * max(len(owners), 1))(*owners)
        self._struct = _Rows(
            self._order.ctypes.data,
            self._starts.ctypes.data,
            ctypes.addressof(self._owners),
            len(owners),
            int(np.diff(self._starts).max(initial=0)),
            max((table.rank for table in tables), default=0),
        )
        self.count = len(self._order)

    @property
    def address(self) -> int:
        """Of the struct ``LoraRows``."""
        return ctypes.addressof(self._struct)

    def deltas(
        self,
        kernels: CpuKernels,
        projection: int,
        x: torch.Tensor,  # [R, inputs] float32
        outputs: int,
    ) -> torch.Tensor:
        """What is added to the sums of one projection: [R, outputs], 0 where no adapter does."""
        assert x.dtype == torch.float32 and x.is_contiguous() and len(x) == self.count
        out = torch.empty(len(x), outputs)
        sizes = (x.shape[1], outputs)
        workspace = torch.empty(kernels.library.rayfin_lora_workspace(self.address, *sizes))
        kernels.library.rayfin_lora_rows(
            *(kernels.pool, self.address, projection, PARTS, x.data_ptr(), *sizes),
            *(workspace.data_ptr(), out.data_ptr()),
        )
        return out

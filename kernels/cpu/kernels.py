"""The compiled kernels on torch tensors. Shapes are checked here; the arithmetic is in C++.

`CpuKernels` owns the thread pool and is passed to all users. All tensors are on the CPU with dense
rows, and float32 unless documented otherwise.
"""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rayfin.kernels.cpu.library import LibraryUnavailable, load, try_load
from rayfin.kernels.shapes import TokenBits

STORAGES = {torch.float32: 0, torch.bfloat16: 1}
"""Storage of exact weights and of pages (Storage in matrix.h)."""


class Pack(Protocol):
    """Packs weights [N_i, K], stacked, or a gate and an up projection as pairs."""

    def __call__(self, weights: list[torch.Tensor], *, paired: bool = False) -> "Matrix": ...


class Activation(IntEnum):
    """The activation of a matmul (Activation in vmath.h)."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    CLAMPED_SWISH = 4  # of experts alone (ClampedSwish)


class CpuKernels:
    """The compiled kernels with their threads.

    Operations are serialized, so Python threads may share it. They release the GIL.

    Raises:
        LibraryUnavailable: The kernels are not built, or not for this machine.
    """

    def __init__(self, threads: int, isa: str | None = None) -> None:
        self.library = load(isa)
        self.threads = max(1, threads)
        self.pool: int = self.library.rayfin_pool_create(self.threads)
        weakref.finalize(self, self.library.rayfin_pool_destroy, self.pool)
        self._packers = ThreadPoolExecutor(self.threads, "pack")  # of which none starts unasked

    def round_rows(self, *, slower: bool = False) -> bool:
        """Rounds the rows that 16-bit weights multiply to bfloat16 from now on.

        False if that is no faster on this machine, or with ``slower`` cannot be done: rows stay
        exact.
        """
        return bool(self.library.rayfin_pool_round_rows(self.pool, slower))

    def pack(
        self,
        weights: list[torch.Tensor],
        *,
        paired: bool = False,
        storage: torch.dtype | None = None,
        spares: list["Matrix"] | None = None,
    ) -> "Matrix":
        """Packs weights [N_i, K], stacked, for ``matmul``; float16 ones as their float32 numbers.

        ``storage`` None keeps them exact: bfloat16 if that holds every value, else float32.
        ``paired`` takes a gate and an up projection of one shape, whose product the matmul returns.
        One of the ``spares`` that has the form of the new matrix becomes it, and leaves the list.
        """
        weights = [weight.detach().contiguous() for weight in weights]
        if storage is None:
            exact = all(self.fits_bfloat16(weight) for weight in weights)
            storage = torch.bfloat16 if exact else torch.float32
        outputs, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
        form = (outputs, inputs, storage, paired)
        matrix = next((spare for spare in spares or () if spare.is_free(*form)), None)
        if matrix is None:
            matrix = Matrix(self.library, *form)
        elif spares:
            spares.remove(matrix)
        first, parts = 0, []
        for weight in weights:
            step = max(1, FILLED // inputs)
            for at in range(0, len(weight), step):
                parts.append((first + at, weight[at : at + step]))
            first += len(weight)
        for _ in self._packers.map(lambda part: matrix.fill(*part), parts):
            pass
        return matrix

    def fits_bfloat16(self, weight: torch.Tensor) -> bool:
        """Whether every value is exactly representable in bfloat16."""
        if weight.dtype == torch.bfloat16:
            return True
        fits = self.library.rayfin_fits_bfloat16
        return all(fits(rows.data_ptr(), rows.numel()) for _, rows in _readable(weight))

    def matmul(
        self,
        x: torch.Tensor,  # [M, K], rows dense
        weight: "Matrix",
        *,
        bias: torch.Tensor | None = None,  # [N]
        residual: torch.Tensor | None = None,  # [M, N]
        alpha: float = 1.0,
        activation: Activation = Activation.NONE,
        out: torch.Tensor | None = None,  # [M, N]; may be `residual`
    ) -> torch.Tensor:
        """residual + alpha * act(x W^T + bias), or act(gate) * up of a paired weight: [M, N].

        A row's result does not depend on the other rows, to the last bit.
        """
        assert x.dtype == torch.float32 and x.dim() == 2 and x.shape[1] == weight.inputs, x.shape
        assert x.stride(1) == 1 or x.shape[1] == 1
        assert activation != Activation.CLAMPED_SWISH
        if out is None:
            out = x.new_empty(x.shape[0], weight.columns)
        assert out.shape == (x.shape[0], weight.columns) and out.dtype == torch.float32
        if bias is not None:
            assert bias.shape == (weight.outputs,) and bias.dtype == torch.float32
            bias = bias.contiguous()
        if residual is not None:
            assert residual.shape == out.shape and not weight.paired
        self.library.rayfin_matmul(
            self.pool,
            weight.handle,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            out.data_ptr(),
            out.stride(0),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            alpha,
            activation,
        )
        return out

    def rms_norm(
        self,
        x: torch.Tensor,  # [M, D], rows dense
        weight: torch.Tensor,  # [D]
        eps: float,
        *,
        residual: torch.Tensor | None = None,  # [M, D]
        alpha: float = 1.0,
        out: torch.Tensor | None = None,  # [M, D]; may be `x` or `residual`
    ) -> torch.Tensor:
        """residual + alpha * x / sqrt(mean(x^2) + eps) * weight: [M, D]."""
        assert x.dim() == 2 and x.stride(1) == 1 and weight.shape == (x.shape[1],)
        out = torch.empty_like(x) if out is None else out
        self.library.rayfin_rms_norm(
            self.pool,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            x.shape[1],
            weight.data_ptr(),
            eps,
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            alpha,
            out.data_ptr(),
            out.stride(0),
        )
        return out

    def highest(
        self, x: torch.Tensor, allowed: TokenBits | None = None
    ) -> npt.NDArray[np.int64]:  # [M, N], rows dense
        """The first index of each row's largest value, or -1 if that is not finite: [M].

        Words of ``allowed`` that are 0 cost nothing.
        """
        assert x.dim() == 2 and x.stride(1) == 1 and x.dtype == torch.float32
        index = np.empty(x.shape[0], np.int64)
        where = (self.pool, x.data_ptr(), x.stride(0), *x.shape)
        if allowed is None:
            self.library.rayfin_highest(*where, index.ctypes.data)
        else:
            place, words = _places(x, allowed)
            self.library.rayfin_highest_allowed(
                *where, words.data_ptr(), words.shape[1], place.data_ptr(), index.ctypes.data
            )
        return index

    def copy_allowed(self, x: torch.Tensor, allowed: TokenBits) -> torch.Tensor:
        """A copy of x [M, N] with -inf for the tokens that a row may not sample."""
        assert x.dim() == 2 and x.stride(1) == 1 and x.dtype == torch.float32
        out = torch.empty(x.shape, dtype=torch.float32)
        place, words = _places(x, allowed)
        self.library.rayfin_copy_allowed(
            self.pool,
            x.data_ptr(),
            x.stride(0),
            *x.shape,
            words.data_ptr(),
            words.shape[1],
            place.data_ptr(),
            out.data_ptr(),
        )
        return out


def _places(x: torch.Tensor, allowed: TokenBits) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's place [M] int64 among the words, or -1, and the words, dense."""
    words = allowed.words.contiguous()
    assert words.dtype == torch.int32 and words.shape[1] * 32 >= x.shape[1]
    place = torch.full((len(x),), -1, dtype=torch.int64)
    place[allowed.rows] = torch.arange(len(words))
    return place, words


PARTS = 4
"""Blocks of memory of a matrix: weights, scales, offsets or shared scales, zero points."""

Part = npt.NDArray[np.uint8]
Parts = Sequence[Part]  # [PARTS] blocks; those that a storage has not are empty


def addresses(parts: Parts | None) -> Any:
    """The blocks as an argument of C."""
    if parts is None:
        return None
    assert len(parts) == PARTS and all(part.ctypes.data % 64 == 0 for part in parts if part.size)
    return (ctypes.c_void_p * PARTS)(*(part.ctypes.data if part.size else None for part in parts))


class Matrix:
    """A weight [outputs, inputs] packed for ``CpuKernels.matmul``, which owns its memory.

    ``parts`` of another such matrix stay where they are, and this one keeps them (stored.py).

    Raises:
        MemoryError: The allocation fails.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        outputs: int,
        inputs: int,
        storage: torch.dtype,
        paired: bool,
        parts: "Parts | None" = None,
    ) -> None:
        self.outputs, self.inputs, self.storage, self.paired = outputs, inputs, storage, paired
        self._library, self._parts = library, parts
        handle = library.rayfin_matrix_create(
            outputs, inputs, STORAGES[storage], paired, addresses(parts)
        )
        if not handle:
            raise MemoryError(f"no memory for a weight of {outputs} x {inputs}")
        self.handle: int = handle
        weakref.finalize(self, library.rayfin_matrix_destroy, handle)

    @property
    def columns(self) -> int:
        """The number of values that a matmul returns per row."""
        return self.outputs // 2 if self.paired else self.outputs

    def is_free(self, outputs: int, inputs: int, storage: torch.dtype, paired: bool) -> bool:
        """Whether it is an exact matrix of this form, in memory that is its alone."""
        if type(self) is not Matrix or self._parts is not None:
            return False
        form = (self.outputs, self.inputs, self.storage, self.paired)
        return form == (outputs, inputs, storage, paired)

    def fill(self, first: int, weight: torch.Tensor) -> None:
        """Packs weight [n, inputs] as the outputs from index ``first``."""
        assert self._parts is None, "the memory is shared"
        assert weight.shape[1] == self.inputs and first + len(weight) <= self.outputs
        assert weight.is_contiguous()
        for at, rows in _readable(weight):
            place = (first + at, len(rows), rows.data_ptr(), rows.stride(0))
            self._library.rayfin_matrix_fill(self.handle, *place, STORAGES[rows.dtype])

    def parts(self) -> list[Part]:
        """Its blocks of memory, which this matrix keeps: the caller does too while it reads."""
        memory, sizes = (ctypes.c_void_p * PARTS)(), (ctypes.c_int64 * PARTS)()
        self._library.rayfin_matrix_parts(self.handle, memory, sizes)
        return [
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(place or 0))
            if size
            else np.zeros(0, np.uint8)
            for place, size in zip(memory, sizes, strict=True)
        ]

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """The stored weights of some outputs [n] int64: [n, inputs] float32."""
        assert outputs.dtype == torch.int64 and outputs.is_contiguous()
        out = torch.empty(len(outputs), self.inputs)
        self._library.rayfin_matrix_rows(
            self.handle, outputs.data_ptr(), len(outputs), out.data_ptr(), self.inputs
        )
        return out


FILLED = 1 << 18
"""Numbers of a weight that a thread packs at once."""

WIDENED = 1 << 20
"""Numbers of a weight in another dtype that are widened at once."""


def _readable(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """First rows, and rows [n, K] from there on, in a dtype that the compiled kernels read."""
    if weight.dtype in (torch.float32, torch.bfloat16):
        yield 0, weight
        return
    step = max(1, WIDENED // weight.shape[1])
    for first in range(0, len(weight), step):
        yield first, weight[first : first + step].float()


def try_kernels(threads: int) -> CpuKernels | None:
    """The kernels, or None if they are unavailable (logged once)."""
    if try_load() is None:
        return None
    try:
        return CpuKernels(threads)
    except LibraryUnavailable:
        return None

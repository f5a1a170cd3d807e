"""Packed matrices over the blocks of others: the same bits, and no copy."""

from functools import partial

import numpy as np
import pytest
import torch

from rayfin.kernels.cpu.codes import pack_int4, pack_int8
from rayfin.kernels.cpu.kernels import CpuKernels, Matrix, Pack
from rayfin.kernels.cpu.stored import describe, restore

OUTPUTS, INPUTS = 46, 77


def weights(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(OUTPUTS, INPUTS, generator=generator) for _ in range(count)]


def packs(kernels: CpuKernels) -> dict[str, Pack]:
    return {
        "float32": kernels.pack,
        "bfloat16": partial(kernels.pack, storage=torch.bfloat16),
        "int8": partial(pack_int8, kernels),
        "int4": partial(pack_int4, kernels),
    }


def copied(matrix: Matrix) -> list[np.ndarray]:
    """Its blocks elsewhere, read-only."""
    copies = []
    for part in matrix.parts():
        room = np.zeros(part.size + 64, np.uint8)
        start = -room.ctypes.data % 64
        room[start : start + part.size] = part
        room.flags.writeable = False
        copies.append(room[start : start + part.size])
    return copies


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("paired", [False, True])
def test_a_restored_matrix_computes_the_same_bits(
    storage: str, paired: bool, kernels: CpuKernels
) -> None:
    matrix = packs(kernels)[storage](weights(2), paired=paired)
    blocks = copied(matrix)
    x = torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(9))
    described, expected = describe(matrix), kernels.matmul(x, matrix)
    del matrix
    same = restore(kernels, described, blocks)
    assert torch.equal(kernels.matmul(x, same), expected)
    assert same.columns == expected.shape[1]
    for mine, given in zip(same.parts(), blocks, strict=True):
        assert mine.size == given.size
        assert not mine.size or mine.ctypes.data == given.ctypes.data


def test_blocks_of_another_matrix_are_refused(kernels: CpuKernels) -> None:
    matrix = kernels.pack(weights(2))
    blocks = copied(kernels.pack(weights(1)))
    with pytest.raises(ValueError, match="parts of other sizes"):
        restore(kernels, describe(matrix), blocks)

"""The matmul of 8-bit weights against the reference: the same integers, so the same results."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.cpu.kernels import Activation, CpuKernels
from rayfin.kernels.cpu.library import ISAS

ROWS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 49, 130])
SIZES = st.integers(1, 150)
EVERY_ISA = pytest.mark.thorough(reason="`make test` has the best instruction set")
WAYS = [
    *(pytest.param((isa, vnni, 1), marks=EVERY_ISA) for isa in ISAS for vnni in (True, False)),
    *((None, vnni, threads) for vnni, threads in ((True, 1), (False, 1), (True, 3))),
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=WAYS, ids=lambda w: f"{w[0]}-{w[1] and 'vnni'}-{w[2]}")
def kernels(
    request: pytest.FixtureRequest, make_kernels: Callable[[str | None, int], CpuKernels]
) -> CpuKernels:
    """Every instruction set, with the instruction made for products of bytes and without it."""
    isa, vnni, threads = request.param
    made = make_kernels(isa, threads)
    made.library.rayfin_pool_use_vnni(made.pool, vnni)
    return made


@settings(max_examples=25)
@given(rows=ROWS, outputs=SIZES, inputs=SIZES, seed=st.integers(0, 99))
def test_any_shape(kernels: CpuKernels, rows: int, outputs: int, inputs: int, seed: int) -> None:
    weight, x = normal(outputs, inputs, seed=seed), normal(rows, inputs, seed=seed + 1)
    actual = kernels.matmul(x, kernels.pack([weight], storage=torch.int8))
    assert torch.equal(actual, reference.matmul_int8(x, weight))


@pytest.mark.parametrize("rows", [1, 5, 60, 500])
@pytest.mark.parametrize("inputs", [576, 1537])
def test_large(kernels: CpuKernels, rows: int, inputs: int) -> None:
    weight, x = normal(300, inputs), normal(rows, inputs, seed=1)
    actual = kernels.matmul(x, kernels.pack([weight], storage=torch.int8))
    assert torch.equal(actual, reference.matmul_int8(x, weight))


def test_the_largest_sums(kernels: CpuKernels) -> None:
    """Nothing saturates on the way: all products are as large as products of bytes can be."""
    for sign in (1.0, -1.0):
        x, weight = torch.full((14, 4096), sign), torch.ones(40, 4096)
        x[:, 1::7], weight[:, 1::7] = -sign, -1.0
        actual = kernels.matmul(x, kernels.pack([weight], storage=torch.int8))
        assert torch.equal(actual, reference.matmul_int8(x, weight))
        torch.testing.assert_close(actual, torch.full((14, 40), 4096 * sign))


@settings(max_examples=10)
@given(rows=ROWS, half=SIZES, inputs=SIZES)
def test_epilogues(kernels: CpuKernels, rows: int, half: int, inputs: int) -> None:
    gate, up = normal(half, inputs), normal(half, inputs, seed=1)
    x, bias = normal(rows, inputs, seed=2), normal(2 * half, seed=3)
    merged = reference.matmul_int8(x, torch.cat([gate, up])) + bias
    paired = kernels.pack([gate, up], paired=True, storage=torch.int8)
    actual = kernels.matmul(x, paired, bias=bias, activation=Activation.SILU)
    torch.testing.assert_close(actual, reference.silu_mul(merged), rtol=1e-5, atol=1e-5)
    residual = normal(rows, 2 * half, seed=4)
    expected = residual + 0.3 * merged
    plain = kernels.pack([gate, up], storage=torch.int8)
    kernels.matmul(x, plain, bias=bias, residual=residual, alpha=0.3, out=residual)
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-5)


def test_rows_apart_in_memory(kernels: CpuKernels) -> None:
    weight, x, y = normal(21, 17), normal(9, 40), normal(9, 50)
    before = y.clone()
    kernels.matmul(x[:, 3:20], kernels.pack([weight], storage=torch.int8), out=y[:, 11:32])
    assert torch.equal(y[:, 11:32], reference.matmul_int8(x[:, 3:20], weight))
    assert torch.equal(y[:, :11], before[:, :11]) and torch.equal(y[:, 32:], before[:, 32:])


def test_a_row_is_the_same_in_any_company(kernels: CpuKernels) -> None:
    weight, x = normal(70, 700), normal(200, 700)
    matrix = kernels.pack([weight], storage=torch.int8)
    every = kernels.matmul(x, matrix)
    for rows in (1, 2, 4, 6, 7, 12, 13, 50):
        assert torch.equal(kernels.matmul(x[:rows], matrix), every[:rows])


def test_odd_rows(kernels: CpuKernels) -> None:
    """Zeros and next to nothing are zeros; what is not finite stays in its row."""
    weight, x = normal(40, 30), normal(14, 30)
    x[0], x[1] = 0.0, 1e-36 * x[1]
    x[3, 5], x[8, 2] = float("nan"), float("inf")
    out = kernels.matmul(x, kernels.pack([weight], storage=torch.int8))
    assert not out[:2].any()
    bad = ~out.isfinite().any(dim=1)
    assert bad.nonzero().flatten().tolist() == [3, 8]
    assert out[[2, 4, 13]].isfinite().all()


def test_weights_read_back(kernels: CpuKernels) -> None:
    weight = normal(70, 33)
    weight[31] = 0.0
    chosen = torch.tensor([69, 0, 33, 31])
    for stored in (weight, weight.bfloat16()):
        values, scales = reference.int8_rows(stored)
        expected = (values * scales.unsqueeze(1))[chosen]
        for paired in (False, True):
            matrix = kernels.pack([stored], paired=paired, storage=torch.int8)
            assert torch.equal(matrix.rows(chosen), expected)


def test_rounding_costs_little(kernels: CpuKernels) -> None:
    weight, x = normal(300, 576), normal(20, 576, seed=1)
    expected = x @ weight.T
    actual = kernels.matmul(x, kernels.pack([weight], storage=torch.int8))
    assert ((actual - expected).norm() / expected.norm()).item() < 0.02

"""The packed matmul against torch in float64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.cpu.kernels import Activation, CpuKernels

ROWS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 49, 130])
SIZES = st.integers(1, 90)
GATES = [Activation.SILU, Activation.GELU_TANH, Activation.GELU]  # the clamped one is of experts


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().T).float()


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=20)
@given(rows=ROWS, outputs=SIZES, inputs=SIZES, half=st.booleans(), seed=st.integers(0, 99))
def test_any_shape(
    kernels: CpuKernels, rows: int, outputs: int, inputs: int, half: bool, seed: int
) -> None:
    weight, x = normal(outputs, inputs, seed=seed), normal(rows, inputs, seed=seed + 1)
    if half:
        weight = weight.bfloat16().float()
    matrix = kernels.pack([weight])
    assert matrix.storage == (torch.bfloat16 if half else torch.float32)
    check(kernels.matmul(x, matrix), product(x, weight))


@settings(max_examples=20)
@given(rows=ROWS, outputs=st.integers(1, 1500), seed=st.integers(0, 99))
def test_however_outputs_are_dealt_out(
    kernels: CpuKernels, rows: int, outputs: int, seed: int
) -> None:
    weight, x = normal(outputs, 9, seed=seed), normal(rows, 9, seed=seed + 1)
    check(kernels.matmul(x, kernels.pack([weight])), product(x, weight))


@pytest.mark.parametrize("rows", [1, 5, 60, 200])
@pytest.mark.parametrize("inputs", [576, 1537])
def test_depth_in_blocks(kernels: CpuKernels, rows: int, inputs: int) -> None:
    weight, x = normal(200, inputs), normal(rows, inputs, seed=1)
    check(kernels.matmul(x, kernels.pack([weight])), product(x, weight))


@settings(max_examples=10)
@given(rows=ROWS, outputs=SIZES, inputs=SIZES)
def test_bias_residual_and_factor(
    kernels: CpuKernels, rows: int, outputs: int, inputs: int
) -> None:
    weight, x, bias = normal(outputs, inputs), normal(rows, inputs), normal(outputs, seed=2)
    residual = normal(rows, outputs, seed=3)
    expected = residual + 0.3 * (product(x, weight) + bias)
    matrix = kernels.pack([weight])
    check(kernels.matmul(x, matrix, bias=bias, residual=residual, alpha=0.3), expected)
    kernels.matmul(x, matrix, bias=bias, residual=residual, alpha=0.3, out=residual)
    check(residual, expected)


@settings(max_examples=10)
@given(rows=ROWS, half=SIZES, inputs=SIZES, activation=st.sampled_from(GATES))
def test_gate_and_up(
    kernels: CpuKernels, rows: int, half: int, inputs: int, activation: Activation
) -> None:
    gate, up = normal(half, inputs), normal(half, inputs, seed=1)
    x, bias = normal(rows, inputs, seed=2), normal(2 * half, seed=3)
    merged = torch.cat([product(x, gate), product(x, up)], dim=-1) + bias
    expected = {
        Activation.SILU: reference.silu_mul(merged),
        Activation.GELU_TANH: reference.gelu_mul(merged),
        Activation.GELU: reference.gelu_mul(merged, tanh=False),
    }[activation]
    matrix = kernels.pack([gate, up], paired=True)
    check(kernels.matmul(x, matrix, bias=bias, activation=activation), expected)


def test_rows_apart_in_memory(kernels: CpuKernels) -> None:
    """x, residual and y may be columns of wider tensors; nothing beside them is touched."""
    weight = normal(21, 17)
    x, y, residual = normal(9, 40), normal(9, 50), normal(9, 60)
    before = y.clone()
    kernels.matmul(x[:, 3:20], kernels.pack([weight]), residual=residual[:, 7:28], out=y[:, 11:32])
    check(y[:, 11:32], product(x[:, 3:20], weight) + residual[:, 7:28])
    assert torch.equal(y[:, :11], before[:, :11]) and torch.equal(y[:, 32:], before[:, 32:])


def test_no_rows(kernels: CpuKernels) -> None:
    assert kernels.matmul(torch.empty(0, 8), kernels.pack([normal(5, 8)])).shape == (0, 5)


@pytest.mark.parametrize("half", [False, True])
def test_a_row_is_the_same_in_any_company(kernels: CpuKernels, half: bool) -> None:
    weight, x = normal(70, 700), normal(600, 700)
    x[15:17] *= 2.0**-124  # parts of these are too small for tiles (amx/matmul_amx_few.cpp)
    matrix = kernels.pack([weight.bfloat16() if half else weight])
    every = kernels.matmul(x, matrix)
    for rows in range(1, 201):
        assert torch.equal(kernels.matmul(x[:rows], matrix), every[:rows]), rows
    for first in (1, 15, 16, 511, 512, 598):
        for count in (1, 2):
            rows = slice(first, first + count)
            assert torch.equal(kernels.matmul(x[rows], matrix), every[rows])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("inputs, error_bits", [(31, 22), (576, 22), (1537, 21)])
def test_as_exact_as_float32(kernels: CpuKernels, half: bool, inputs: int, error_bits: int) -> None:
    """float32's own sum of 1,537 products is up to 2^-21.9 of their sizes off."""
    scale = 2.0 ** (torch.arange(inputs) % 81 - 40)
    weight, x = normal(40, inputs) * scale, normal(30, inputs, seed=1) / scale
    weight = weight.bfloat16().float() if half else weight
    exact, size = x.double() @ weight.double().T, x.abs().double() @ weight.abs().double().T
    error = (kernels.matmul(x, kernels.pack([weight])).double() - exact).abs()
    assert (error <= 2.0**-error_bits * size).all(), (error / size).max()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_nothing_of_a_float_is_left_out(kernels: CpuKernels, half: bool, rows: int) -> None:
    """Products of parts (kernels/cpu/amx/matmul_amx.cpp) by one give the float back, to the bit."""
    one = torch.eye(70)
    x = normal(rows, 70) * 2.0 ** (torch.arange(70) % 81 - 40)
    assert torch.equal(kernels.matmul(x, kernels.pack([one.bfloat16() if half else one])), x)


def test_special_values_stay_in_their_row(kernels: CpuKernels) -> None:
    weight, x = normal(40, 30), normal(14, 30)
    x[3, 5], x[8, 2] = float("nan"), float("inf")
    out = kernels.matmul(x, kernels.pack([weight]))
    bad = ~out.isfinite().all(dim=1)
    assert bad.nonzero().flatten().tolist() == [3, 8]


def test_weights_read_back(kernels: CpuKernels) -> None:
    weight = normal(70, 33)
    chosen = torch.tensor([69, 0, 33, 31])
    assert torch.equal(kernels.pack([weight]).rows(chosen), weight[chosen])
    assert torch.equal(kernels.pack([weight], paired=True).rows(chosen), weight[chosen])
    rounded = weight.bfloat16()
    assert torch.equal(kernels.pack([rounded]).rows(chosen), rounded[chosen].float())


def test_storage_is_exact_unless_told_otherwise(
    make_kernels: Callable[[str | None, int], CpuKernels],
) -> None:
    kernels = make_kernels(None, 1)
    tiny = torch.tensor([[1e-40, -0.0, 3.0e38]]).bfloat16()  # float16 could not hold them
    assert kernels.pack([tiny.float()]).storage == torch.bfloat16
    assert kernels.pack([tiny.float() * 1.001]).storage == torch.float32
    weight = normal(9, 9)
    forced = kernels.pack([weight], storage=torch.bfloat16)
    assert torch.equal(forced.rows(torch.arange(9)), weight.bfloat16().float())

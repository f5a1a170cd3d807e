"""Products of 16-bit weights with rows that are rounded to bfloat16."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels.cpu.kernels import Activation, CpuKernels
from rayfin.kernels.cpu.library import ISAS

ROWS = st.sampled_from([1, 2, 3, 5, 8, 12, 13, 49, 130])
SIZES = st.integers(1, 90)


@pytest.fixture(scope="module", params=ISAS)
def rounding(
    request: pytest.FixtureRequest, make_kernels: Callable[[str | None, int], CpuKernels]
) -> CpuKernels:
    kernels = make_kernels(request.param, 2)
    if not kernels.round_rows(slower=True):
        pytest.skip("it has no products of bfloat16")
    return kernels


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20)
@given(rows=ROWS, outputs=SIZES, inputs=SIZES, seed=st.integers(0, 99))
def test_products_are_those_of_rounded_rows(
    rounding: CpuKernels, rows: int, outputs: int, inputs: int, seed: int
) -> None:
    weight, x = normal(outputs, inputs, seed=seed).bfloat16(), normal(rows, inputs, seed=seed + 1)
    expected = (x.bfloat16().double() @ weight.double().T).float()
    actual = rounding.matmul(x, rounding.pack([weight]))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", [64, 577])
def test_a_row_does_not_depend_on_the_others(rounding: CpuKernels, inputs: int) -> None:
    matrix = rounding.pack([normal(100, inputs, seed=0).bfloat16()])
    x = normal(600, inputs, seed=1)
    whole = rounding.matmul(x, matrix)
    for count in (1, 2, 3, 7, 30, 130):
        assert torch.equal(rounding.matmul(x[5 : 5 + count], matrix), whole[5 : 5 + count])


def test_weights_of_32_bits_keep_exact_rows(
    rounding: CpuKernels, make_kernels: Callable[[str | None, int], CpuKernels]
) -> None:
    x, weight = normal(20, 64, seed=0), normal(30, 64, seed=1)
    product = rounding.matmul(x, rounding.pack([weight]))
    torch.testing.assert_close(product, x @ weight.T, rtol=1e-4, atol=1e-4)


def test_gates_and_what_is_not_finite(rounding: CpuKernels) -> None:
    gate, up = (normal(40, 33, seed=seed).bfloat16() for seed in (0, 1))
    x = normal(9, 33, seed=2)
    x[3, 7], x[4, 7] = float("nan"), 3.39e38
    matrix = rounding.pack([gate, up], paired=True)
    out = rounding.matmul(x, matrix, activation=Activation.SILU)
    rows = x.bfloat16().double()
    expected = torch.nn.functional.silu(rows @ gate.double().T) * (rows @ up.double().T)
    fine = [0, 1, 2, 5, 6, 7, 8]
    torch.testing.assert_close(out[fine], expected[fine].float(), rtol=1e-3, atol=1e-3)
    assert bool(out[3].isnan().all())

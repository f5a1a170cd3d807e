"""The compiled RMS norm against the reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.cpu.kernels import CpuKernels


@settings(max_examples=20)
@given(rows=st.integers(0, 70), dim=st.integers(1, 600), seed=st.integers(0, 99))
def test_any_shape(kernels: CpuKernels, rows: int, dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, dim, generator=generator)
    weight = torch.randn(dim, generator=generator)
    normed = reference.rms_norm(x, weight, 1e-5)
    close(kernels.rms_norm(x, weight, 1e-5), normed)
    close(kernels.rms_norm(x, weight, 1e-5, residual=residual, alpha=0.3), residual + 0.3 * normed)
    kernels.rms_norm(x, weight, 1e-5, residual=residual, out=residual)
    kernels.rms_norm(x, weight, 1e-5, out=x)
    close(x, normed)


def test_rows_apart_in_memory(kernels: CpuKernels) -> None:
    x, weight = torch.randn(9, 50), torch.randn(33)
    close(kernels.rms_norm(x[:, 5:38], weight, 1e-6), reference.rms_norm(x[:, 5:38], weight, 1e-6))


def test_a_bad_row_stays_alone(kernels: CpuKernels) -> None:
    x = torch.randn(40, 64)
    x[7, 3] = float("nan")
    out = kernels.rms_norm(x, torch.ones(64), 1e-6)
    assert (~out.isfinite().all(dim=1)).nonzero().flatten().tolist() == [7]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

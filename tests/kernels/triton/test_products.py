"""Products of few rows with norm, bias, residual and gate in them, against the reference."""

from collections.abc import Callable

import pytest
import torch

from rayfin.kernels import reference

pytest.importorskip("triton")
from rayfin.kernels.triton.products import add_product, gated_product, normed_product

Close = Callable[[torch.Tensor, torch.Tensor], None]
EPS = 1e-5
DTYPES = [torch.float32, torch.float16]
SHAPES = [(1, 24, 20), (3, 130, 17), (18, 16, 33), (70, 8, 5)]  # rows, inputs, outputs


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed) / shape[-1] ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_normed_product(
    device: torch.device, close: Close, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    x, norm = (3 * normal(rows, inputs)).to(dtype), 1 + normal(inputs, seed=1)
    weight, bias = weight_of(outputs, inputs, seed=2).to(dtype), normal(outputs, seed=3).to(dtype)
    wanted = reference.rms_norm(x.float(), norm, EPS) @ weight.float().T + bias.float()
    on_device = (x.to(device), norm.to(device), weight.to(device), bias.to(device))
    close(normed_product(*on_device, EPS), wanted)
    plain = normed_product(x.to(device), None, weight.to(device), None, EPS)
    close(plain, x.float() @ weight.float().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_add_product(
    device: torch.device, close: Close, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    x, hidden = normal(rows, inputs).to(dtype), normal(rows, outputs, seed=1).to(dtype)
    weight, bias = weight_of(outputs, inputs, seed=2).to(dtype), normal(outputs, seed=3).to(dtype)
    stream = hidden.clone().to(device)
    add_product(x.to(device), weight.to(device), bias.to(device), stream, residual_scale=0.7)
    product = x.float() @ weight.float().T + bias.float()
    close(stream, hidden.float() + 0.7 * product)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "norm", "bias"),
    [("silu", True, False), ("gelu_tanh", True, True), ("gelu", False, True)],
)
def test_gated_product(
    device: torch.device, close: Close, dtype: torch.dtype, activation: str, norm: bool, bias: bool
) -> None:
    for rows, inputs, outputs in SHAPES:
        x, scales = normal(rows, inputs).to(dtype), 1 + normal(inputs, seed=1)
        weight = weight_of(2 * outputs, inputs, seed=2).to(dtype)
        offset = normal(2 * outputs, seed=3).to(dtype)
        rows_in = reference.rms_norm(x.float(), scales, EPS) if norm else x.float()
        gate_up = rows_in @ weight.float().T + (offset.float() if bias else 0.0)
        wanted = {
            "silu": reference.silu_mul,
            "gelu_tanh": reference.gelu_mul,
            "gelu": lambda both: reference.gelu_mul(both, tanh=False),
        }[activation](gate_up)
        out = gated_product(
            x.to(device),
            scales.to(device) if norm else None,
            weight.to(device),
            offset.to(device) if bias else None,
            EPS,
            activation,
        )
        close(out, wanted)

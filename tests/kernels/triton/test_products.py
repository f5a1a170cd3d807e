"""Products of few rows with norm, bias, residual and gate in them, against the reference."""

from collections.abc import Callable

import pytest
import torch

from rayfin.kernels import reference

pytest.importorskip("triton")
from rayfin.kernels.triton.products import (
    add_product,
    few_rows,
    gated_product,
    product,
    widest_row,
)

Close = Callable[[torch.Tensor, torch.Tensor], None]
EPS = 1e-5
DTYPES = [torch.float32, torch.float16]
SHAPES = [  # rows, inputs, outputs
    *((1, 24, 20), (2, 16, 600), (3, 130, 17), (4, 8, 5)),
    *((5, 1100, 17), (8, 24, 33), (16, 40, 5)),  # on tensor cores
]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed) / shape[-1] ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_product(
    device: torch.device, close: Close, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    x, weight = (3 * normal(rows, inputs)).to(dtype), weight_of(outputs, inputs, seed=2).to(dtype)
    bias, gain = normal(outputs, seed=3).to(dtype), torch.full((inputs,), 2.0)
    wanted = reference.rms_norm(x.float(), gain, EPS) @ weight.float().T + bias.float()
    on_device = x.to(device), weight.to(device)
    close(product(*on_device, bias.to(device), gain=2.0, eps=EPS), wanted)
    close(product(*on_device, None), x.float() @ weight.float().T)


@pytest.mark.gpu
def test_rows_do_not_depend_on_those_beside_them(device: torch.device) -> None:
    """On tensor cores; of tiles of 8 rows and of 16, since graphs pad a step's rows. Without a GPU
    NumPy multiplies."""
    x, weight = normal(13, 1100).half().to(device), weight_of(20, 1100).half().to(device)
    whole = product(x, weight, None)
    assert torch.equal(product(x[:8], weight, None), whole[:8])
    assert torch.equal(product(x[4:9], weight, None), whole[4:9])


def test_rows_at_the_end_of_float16(device: torch.device, close: Close) -> None:
    """What is not yet divided is over its range, and in none of it."""
    x, weight = (6e4 * normal(3, 40).sign()).half(), normal(17, 40, seed=1).half()
    wanted = reference.rms_norm(x.float(), torch.ones(40), EPS) @ weight.float().T
    close(product(x.to(device), weight.to(device), None, gain=1.0, eps=EPS), wanted)


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
        x, gain = normal(rows, inputs).to(dtype), torch.full((inputs,), 2.0)
        weight = weight_of(2 * outputs, inputs, seed=2).to(dtype)
        offset = normal(2 * outputs, seed=3).to(dtype)
        rows_in = reference.rms_norm(x.float(), gain, EPS) if norm else x.float()
        gate_up = rows_in @ weight.float().T + (offset.float() if bias else 0.0)
        wanted = {
            "silu": reference.silu_mul,
            "gelu_tanh": reference.gelu_mul,
            "gelu": lambda both: reference.gelu_mul(both, tanh=False),
        }[activation](gate_up)
        out = gated_product(
            x.to(device),
            weight.to(device),
            offset.to(device) if bias else None,
            activation,
            gain=2.0 if norm else None,
            eps=EPS,
        )
        close(out, wanted)


def test_the_wider_the_model_the_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = (1024, 2048, 4096, 8192, 16384)
    assert [few_rows(hidden) for hidden in widths] == [4, 4, 2, 2, 0]
    monkeypatch.setenv("RAYFIN_TRY", "sixteen_rows")
    assert [few_rows(hidden) for hidden in widths] == [16, 16, 2, 2, 0]
    assert [widest_row(rows) for rows in (4, 5)] == [8192, 4096]

"""Weights rounded to few bits in torch's operations, against the oracle."""

import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.grouped import ROUNDED_GROUP, round_weight


def drawn(outputs: int, inputs: int) -> torch.Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    weight[1] = 0.0
    return weight


@pytest.mark.parametrize("inputs", [40, 64, 200])
def test_four_bits(inputs: int) -> None:
    weight = drawn(9, inputs)
    rounded = round_weight(weight, 4)
    expected = reference.round_int4(weight, min(ROUNDED_GROUP, inputs))
    assert rounded.values.dtype == torch.uint8 and rounded.values.shape == weight.shape
    torch.testing.assert_close(rounded.dense(), expected.dense())


def test_eight_bits() -> None:
    weight = drawn(9, 200)
    rounded = round_weight(weight, 8)
    assert rounded.values.dtype == torch.int8 and not rounded.values[1].any()
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded.dense() - weight).abs() <= step / 2 + 1e-6).all()

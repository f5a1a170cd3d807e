"""The products of one adapter: packed ones against torch's, and a row's bits."""

import pytest
import torch

from rayfin.actors.runner.parts.lora.reader import LowRank
from rayfin.kernels.cpu.kernels import try_kernels
from rayfin.kernels.cpu.low_rank import PackedLowRank


@pytest.mark.parametrize("rank", [1, 3, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products(rank: int, dtype: torch.dtype) -> None:
    kernels = try_kernels(1)
    if kernels is None:
        pytest.skip("the kernels are not built")
    torch.manual_seed(rank)
    low_rank = LowRank(torch.randn(rank, 37).to(dtype), torch.randn(50, rank).to(dtype), 0.75)
    packed = PackedLowRank(kernels, low_rank.a, low_rank.b, low_rank.scale)
    x = torch.randn(70, 37).to(dtype)
    exact = LowRank(low_rank.a.double(), low_rank.b.double(), 0.75).delta(x)
    assert torch.allclose(packed.delta(x).double(), exact, rtol=1e-4, atol=1e-3)
    for rows in ([5], [5, 9], list(range(40)), [69, 5]):
        beside = packed.delta(x[rows])[rows.index(5)]
        assert torch.equal(beside, packed.delta(x[5:6])[0]), "it depends on its neighbours"

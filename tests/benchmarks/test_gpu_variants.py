"""Forms of kernels that only the GPU's script has."""

import pytest
import torch

pytest.importorskip("triton")
from gpu_variants import grouped

from rayfin.kernels.triton.experts import Experts, run_experts


def test_torchs_grouped_product_computes_experts() -> None:
    """One of them without a row."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = (torch.randn(shape) / 4 for shape in ((4, 2, 16, 32), (4, 32, 16)))
    experts = Experts(*(each.half().to(device) for each in weights), "silu")
    x, shares = torch.randn(7, 32).half().to(device), torch.rand(7, 2).half().to(device)
    chosen = torch.tensor([[3, 0], [0, 3], [0, 2], [2, 0], [3, 2], [0, 2], [3, 0]], device=device)
    given = grouped(x, experts, chosen, shares)
    wanted = run_experts(x, experts, chosen, shares)
    torch.testing.assert_close(given, wanted, rtol=1e-2, atol=1e-2)

"""The parts of a layer, against torch's own."""

import torch
import torch.nn.functional as F

from rayfin.kernels import reference


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 16) * 3, torch.randn(16)
    expected = F.rms_norm(x, (16,), weight, eps=1e-2)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-2), expected)
    assert reference.rms_norm(x.bfloat16(), weight, 1e-2).dtype == torch.bfloat16


def test_rotary_turns_pairs() -> None:
    """As complex numbers: pair i is multiplied by exp(1j * position * theta ** (-2i / D))."""
    torch.manual_seed(0)
    x, positions = torch.randn(6, 3, 8), torch.tensor([0, 1, 2, 50, 51, 4000])
    out = reference.rotary(x, positions, theta=100.0)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    angles = positions.double()[:, None] * 100.0 ** (-torch.arange(4).double() / 4)  # [T, 4]
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    expected = torch.cat([turned.real, turned.imag], dim=-1).float()
    torch.testing.assert_close(out, expected)
    assert torch.equal(out[0], x[0])


def test_rotary_scores_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(i: int, j: int) -> torch.Tensor:
        turned_q = reference.rotary(q, torch.tensor([i]), 1e4)
        return (turned_q * reference.rotary(k, torch.tensor([j]), 1e4)).sum()

    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=1e-4, atol=1e-4)
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3


def test_gated_activations() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 32) * 4
    gate, up = gate_up[:, :16], gate_up[:, 16:]
    torch.testing.assert_close(reference.silu_mul(gate_up), F.silu(gate) * up)
    torch.testing.assert_close(reference.gelu_mul(gate_up), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(reference.gelu_mul(gate_up, tanh=False), F.gelu(gate) * up)


def test_a_clamped_gate() -> None:
    """Within the limits: SiLU with another slope, and one added to up."""
    torch.manual_seed(0)
    gate_up = torch.randn(5, 32)
    gate, up = gate_up[:, :16], gate_up[:, 16:]
    expected = F.silu(1.702 * gate) / 1.702 * (1 + up)
    torch.testing.assert_close(reference.clamped_swish_mul(gate_up, 1.702, 9.0), expected)
    far = torch.tensor([[100.0, 5.0]])  # gate, up
    out = reference.clamped_swish_mul(far, 1.702, 2.0)
    torch.testing.assert_close(out, torch.tensor([[3 * 2 / (1 + torch.e ** (-3.404))]]))

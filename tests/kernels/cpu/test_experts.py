"""Mixtures of experts in one call against the reference, one row and one expert at a time."""

from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.cpu.codes import pack_int8
from rayfin.kernels.cpu.experts import ClampedSwish, ExpertBiases, pack_experts
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Pack

GATE = ClampedSwish(1.702, 0.9)
"""A limit that many values reach."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values / shape[-1] ** 0.5


def routing(rows: int, count: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts for each row, the last of them sometimes one that does not exist."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, count + 1, generator=generator).argsort(dim=1)[:, :top_k]
    return chosen.contiguous(), torch.rand(rows, top_k, generator=generator)


@settings(max_examples=20)
@given(
    rows=st.sampled_from([1, 2, 5, 13, 40]),
    count=st.integers(1, 9),
    top_k=st.integers(1, 4),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_any_shape(
    kernels: CpuKernels, rows: int, count: int, top_k: int, hidden: int, inner: int, seed: int
) -> None:
    gate_up, down = normal(count, 2 * inner, hidden, seed=seed), normal(count, hidden, inner)
    x = normal(rows, hidden, seed=seed + 1) * hidden**0.5
    chosen, weights = routing(rows, count, min(top_k, count), seed)
    experts = pack_experts(kernels, gate_up, down, Activation.SILU)
    expected = reference.experts(x, gate_up, down, chosen, weights)
    torch.testing.assert_close(experts.run(x, chosen, weights), expected, rtol=1e-4, atol=1e-5)


def test_a_row_is_the_same_in_any_company(kernels: CpuKernels) -> None:
    gate_up, down, x = normal(6, 66, 50), normal(6, 50, 33), normal(40, 50, seed=1)
    chosen, weights = routing(40, 6, 3, seed=2)
    biases = ExpertBiases(normal(6, 66), normal(6, 50))
    int8: Pack = partial(pack_int8, kernels)
    plain: Pack = kernels.pack
    for pack, gate in ((plain, Activation.SILU), (plain, GATE), (int8, Activation.SILU)):
        experts = pack_experts(kernels, gate_up, down, gate, pack, biases)
        every = experts.run(x, chosen, weights)
        for rows in (1, 2, 7, 13):
            assert torch.equal(experts.run(x[:rows], chosen[:rows], weights[:rows]), every[:rows])


def test_all_rows_to_one_expert_and_none(kernels: CpuKernels) -> None:
    gate_up, down, x = normal(4, 20, 16), normal(4, 16, 10), normal(9, 16, seed=1)
    experts = pack_experts(kernels, gate_up, down, Activation.SILU)
    for expert in (0, 3, 4, -1):
        chosen, weights = torch.full((9, 1), expert), torch.ones(9, 1)
        expected = reference.experts(x, gate_up, down, chosen, weights)
        torch.testing.assert_close(experts.run(x, chosen, weights), expected, rtol=1e-4, atol=1e-5)
    assert experts.run(x[:0], chosen[:0], weights[:0]).shape == (0, 16)


@settings(max_examples=20)
@given(
    rows=st.sampled_from([1, 2, 5, 13, 40]),
    count=st.integers(1, 5),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_biases_and_a_clamped_gate(
    kernels: CpuKernels, rows: int, count: int, hidden: int, inner: int, seed: int
) -> None:
    """As gpt-oss has them."""
    gate_up, down = normal(count, 2 * inner, hidden, seed=seed), normal(count, hidden, inner)
    biases = ExpertBiases(
        gate_up=normal(count, 2 * inner, seed=seed + 2) * inner**0.5, down=normal(count, hidden)
    )
    x = normal(rows, hidden, seed=seed + 1) * hidden**0.5
    chosen, weights = routing(rows, count, min(2, count), seed)
    experts = pack_experts(kernels, gate_up, down, GATE, biases=biases)
    expected = reference.experts(
        *(x, gate_up, down, chosen, weights),
        gated=lambda values: reference.clamped_swish_mul(values, GATE.slope, GATE.limit),
        gate_up_bias=biases.gate_up,
        down_bias=biases.down,
    )
    torch.testing.assert_close(experts.run(x, chosen, weights), expected, rtol=1e-4, atol=1e-5)


def test_a_clamp_does_not_hide_numbers_that_are_none(kernels: CpuKernels) -> None:
    gate_up, down, x = normal(1, 20, 16), normal(1, 16, 10), normal(3, 16)
    x[1, 4] = float("nan")
    experts = pack_experts(kernels, gate_up, down, GATE)
    out = experts.run(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert out[[0, 2]].isfinite().all() and out[1].isnan().all()

"""Mixtures of experts on the compiled kernels, from the forms that transformers has."""

from typing import Any

import torch
from torch import nn

from rayfin.actors.runner.models.inspect_layers import clamped_gate, gates_plainly, is_experts
from rayfin.actors.runner.models.mapped_weights import rest_in_each, stored
from rayfin.kernels.cpu.experts import ExpertBiases, PackedExperts, pack_experts
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Pack


class PackedExpertsModule(nn.Module):
    """Replaces transformers' experts: same arguments, one call of the compiled kernels."""

    def __init__(self, experts: PackedExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(
        self,
        hidden_states: torch.Tensor,  # [T, H]
        top_k_index: torch.Tensor,  # [T, K] int64
        top_k_weights: torch.Tensor,  # [T, K]
    ) -> torch.Tensor:
        """[T, H] in the dtype of ``hidden_states``."""
        out = self.experts.run(hidden_states.float(), top_k_index, top_k_weights.float())
        return out.to(hidden_states.dtype)


def has_packed_form(module: nn.Module, activation: Activation | None) -> bool:
    """Whether ``packed_experts`` takes it; ``activation`` is the model's where kernels have it."""
    if activation is not None and is_experts(module):
        return gates_plainly(module)
    return clamped_gate(module) is not None


def packed_experts(
    kernels: CpuKernels, module: Any, activation: Activation | None, pack: Pack
) -> PackedExpertsModule:
    """The compiled form of experts, whose own weights give up their memory if it is exact."""
    gate_up, down = module.gate_up_proj, module.down_proj
    if (gate := clamped_gate(module)) is None:
        assert activation is not None
        experts = pack_experts(kernels, stored(gate_up), stored(down), activation, pack)
        rest_in_each(gate_up, experts.gate_up)
        rest_in_each(down, experts.down)
        return PackedExpertsModule(experts)
    biases = ExpertBiases(
        _apart(stored(module.gate_up_proj_bias), dim=1), stored(module.down_proj_bias)
    )
    first, last = (_apart(one.T, dim=0) for one in stored(gate_up)), (one.T for one in stored(down))
    experts = pack_experts(kernels, first, last, gate, pack, biases)
    rest_in_each(gate_up, experts.gate_up, _in_turn)
    rest_in_each(down, experts.down, _turned)
    return PackedExpertsModule(experts)


def _apart(gate_up: torch.Tensor, dim: int) -> torch.Tensor:
    """Gate and up outputs in turn -> the gate's before those of up."""
    return torch.cat(
        [gate_up[(slice(None),) * dim + (slice(first, None, 2),)] for first in (0, 1)], dim
    )


def _in_turn(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2 F, H], gate above up -> [E, H, 2 F], gate and up outputs in turn."""
    return torch.stack(rows.mT.chunk(2, dim=-1), dim=-1).flatten(-2)


def _turned(rows: torch.Tensor) -> torch.Tensor:
    """[E, H, F] -> [E, F, H]."""
    return rows.mT

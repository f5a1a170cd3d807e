"""A recognised layer's weights on a GPU: projections of the same rows merged into one."""

from dataclasses import dataclass

import torch
from torch import nn

from rayfin.actors.runner.fuse_decoder import Attending
from rayfin.actors.runner.fuse_layers import GatedParts, LayerParts, norm_weight


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Weights of an MLP with a gate."""

    gate_up: torch.Tensor  # [2 F, hidden]
    down: torch.Tensor  # [hidden, F]
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer's weights; norms are float32, None is absent."""

    qkv: torch.Tensor  # [H * Dk + Hkv * (Dk + Dv), hidden]
    attention_out: torch.Tensor
    qkv_bias: torch.Tensor | None
    attention_out_bias: torch.Tensor | None
    mlp: GatedMlp | nn.Module  # a module: transformers' mixture, around our experts
    attention_norm: torch.Tensor | None
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    how: Attending
    rotary: int


def merge_layer(part: LayerParts, how: Attending, rotary: int) -> GpuLayer:
    def vector(norm: nn.Module | None) -> torch.Tensor | None:
        weight = norm_weight(norm)
        return None if weight is None else weight[0]

    return GpuLayer(
        qkv=_merge(part.query_key_value),
        attention_out=part.attention_out.weight,
        qkv_bias=_merge_biases(part.query_key_value),
        attention_out_bias=part.attention_out.bias,
        mlp=_merge_mlp(part.mlp),
        attention_norm=vector(part.attention_norm),
        attention_out_norm=vector(part.attention_out_norm),
        mlp_norm=vector(part.mlp_norm),
        mlp_out_norm=vector(part.mlp_out_norm),
        query_norm=vector(part.query_norm),
        key_norm=vector(part.key_norm),
        how=how,
        rotary=rotary,
    )


def _merge_mlp(mlp: GatedParts | nn.Module) -> GatedMlp | nn.Module:
    if not isinstance(mlp, GatedParts):
        return mlp
    gate_up_bias = _merge_biases(mlp.gate_up)
    return GatedMlp(_merge(mlp.gate_up), mlp.down.weight, gate_up_bias, mlp.down.bias)


def _merge(linears: list[nn.Linear]) -> torch.Tensor:
    """The weights, one below the other; the layers keep theirs as a part of it."""
    if len(linears) == 1:
        return linears[0].weight
    merged = torch.cat([linear.weight.detach() for linear in linears])
    start = 0
    for linear in linears:
        linear.weight.data = merged[start : start + linear.out_features]
        start += linear.out_features
    return merged


def _merge_biases(linears: list[nn.Linear]) -> torch.Tensor | None:
    """The merged bias; zeros where only some have one."""
    if all(linear.bias is None for linear in linears):
        return None
    biases: list[torch.Tensor] = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return torch.cat(biases)

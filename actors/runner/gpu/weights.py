"""A recognized layer's weights on a GPU: projections of the same input are merged into one.

`fold_norms` multiplies the weights of norms into the projections that follow them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rayfin.actors.runner.models.inspect_decoder import AttentionSpec
from rayfin.actors.runner.models.inspect_layers import GatedParts, LayerParts, Linear, norm_weight

LARGEST_FLOAT16 = 65504.0
LARGEST_ROW = 4096.0
"""The largest root mean square of a float16 residual row whose products must not overflow."""


@dataclass(frozen=True, slots=True)
class Projection:
    """norm(x) W^T + b."""

    weight: torch.Tensor  # [N, hidden]
    bias: torch.Tensor | None  # [N]
    norm: torch.Tensor | None  # [hidden] fp32
    gain: float | None = None
    """If not None, ``weight`` includes the norm's weights divided by this, and ``norm`` is None."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Weights of an MLP with a gate."""

    gate_up: Projection  # to [2 F]
    down: torch.Tensor  # [hidden, F]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer's weights; norms are float32, None is absent."""

    qkv: Projection  # to [H * Dk + Hkv * (Dk + Dv)]
    attention_out: torch.Tensor
    attention_out_bias: torch.Tensor | None
    mlp: GatedMlp | nn.Module  # a module: transformers' mixture, around our experts
    mlp_norm: torch.Tensor | None  # of a mixture
    attention_out_norm: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    spec: AttentionSpec
    rotary: int


def merge_layer(part: LayerParts, spec: AttentionSpec, rotary: int) -> GpuLayer:
    def vector(norm: nn.Module | None) -> torch.Tensor | None:
        weight = norm_weight(norm)
        return None if weight is None else weight[0]

    dense = isinstance(part.mlp, GatedParts)
    return GpuLayer(
        qkv=_project(part.query_key_value, vector(part.attention_norm)),
        attention_out=part.attention_out.weight,
        attention_out_bias=part.attention_out.bias,
        mlp=_merge_mlp(part.mlp, vector(part.mlp_norm)),
        mlp_norm=None if dense else vector(part.mlp_norm),
        attention_out_norm=vector(part.attention_out_norm),
        mlp_out_norm=vector(part.mlp_out_norm),
        query_norm=vector(part.query_norm),
        key_norm=vector(part.key_norm),
        spec=spec,
        rotary=rotary,
    )


def fold_norms(layer: GpuLayer, part: LayerParts) -> GpuLayer:
    """Folds the norms before the layer's projections into their weights, in place.

    The transformers module ``part`` shares these weights. Its norms are set so that it computes the
    same as before, except for rounding. The norm before a mixture stays.
    """
    qkv = _fold(layer.qkv, part.attention_norm)
    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        mlp = replace(mlp, gate_up=_fold(mlp.gate_up, part.mlp_norm))
    return replace(layer, qkv=qkv, mlp=mlp)


def _fold(projection: Projection, norm: nn.Module | None) -> Projection:
    if norm is None or projection.norm is None:
        return projection
    norm_weights: torch.Tensor = norm.weight.data  # type: ignore[assignment]
    adds_one = not torch.equal(norm_weights.float(), projection.norm)  # Gemma's 1 + weight
    gain = _gain(projection.weight, projection.norm)
    projection.weight.data.mul_(projection.norm / gain)
    norm_weights.fill_(gain - 1.0 if adds_one else gain)
    return replace(projection, norm=None, gain=gain)


def _gain(weight: torch.Tensor, norm: torch.Tensor) -> float:
    """The power of two that keeps products of rows before their division in float16's range."""
    if weight.dtype != torch.float16:
        return 1.0
    lengths = torch.linalg.vector_norm(weight * norm, dim=1)
    # No output exceeds the row's root mean square times this (Cauchy and Schwarz).
    largest_output = float(lengths.max()) * math.sqrt(weight.shape[1])
    return 2.0 ** max(
        0, math.ceil(math.log2(max(largest_output, 1.0) * LARGEST_ROW / LARGEST_FLOAT16))
    )


def _project(linears: Sequence[Linear], norm: torch.Tensor | None) -> Projection:
    plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
    assert len(plain) == len(linears), "weights of codes are a CPU's"
    return Projection(_merge(plain), _merge_biases(plain), norm)


def _merge_mlp(mlp: GatedParts | nn.Module, norm: torch.Tensor | None) -> GatedMlp | nn.Module:
    if not isinstance(mlp, GatedParts):
        return mlp
    return GatedMlp(_project(mlp.gate_up, norm), mlp.down.weight, mlp.down.bias)


def _merge(linears: list[nn.Linear]) -> torch.Tensor:
    """Stacks the weights; the layers' weights become views of the result."""
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

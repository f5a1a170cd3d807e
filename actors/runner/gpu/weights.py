"""A recognized layer's weights on a GPU: projections of the same input are merged into one.

`fold_norms` multiplies the weights of norms into the projections that follow them; not into codes.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.gpu.quant_linear import TritonLinear, merged
from rayfin.actors.runner.models.inspect_decoder import AttentionSpec
from rayfin.actors.runner.models.inspect_layers import GatedParts, LayerParts, Linear, norm_weight
from rayfin.kernels.triton.quantized import CodedWeight

logger = logging.getLogger(__name__)

LARGEST_FLOAT16 = 65504.0
LARGEST_ROW = 4096.0
"""The largest root mean square of a float16 residual row whose products must not overflow."""

Weight = torch.Tensor | CodedWeight
"""[N, K]: plain numbers, or codes of a quantised layer."""


@dataclass(frozen=True, slots=True)
class Projection:
    """norm(x) W^T + b."""

    weight: Weight  # [N, hidden]
    bias: torch.Tensor | None  # [N]
    norm: torch.Tensor | None  # [hidden] fp32
    gain: float | None = None
    """If not None, ``weight`` includes the norm's weights divided by this, and ``norm`` is None."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Weights of an MLP with a gate."""

    gate_up: Projection  # to [2 F]
    down: Weight  # [hidden, F]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer's weights; norms are float32, None is absent."""

    qkv: Projection  # to [H * Dk + Hkv * (Dk + Dv)]
    attention_out: Weight
    attention_out_bias: torch.Tensor | None
    mlp: GatedMlp | nn.Module  # a module: transformers' mixture, around our experts
    mlp_norm: torch.Tensor | None  # of a mixture
    attention_out_norm: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    spec: AttentionSpec
    rotary: int

    @property
    def is_coded(self) -> bool:
        """Whether one of its weights is of codes."""
        weights = [self.qkv.weight, self.attention_out]
        if isinstance(self.mlp, GatedMlp):
            weights += [self.mlp.gate_up.weight, self.mlp.down]
        return any(isinstance(weight, CodedWeight) for weight in weights)


def make_alike(model: nn.Module, layers: Sequence[LayerParts]) -> bool:
    """Makes codes plain that cannot be merged with those of the same input, and says if it did."""
    groups = [part.query_key_value for part in layers]
    groups += [part.mlp.gate_up for part in layers if isinstance(part.mlp, GatedParts)]
    unlike = {id(linear) for group in groups if not _are_alike(group) for linear in group}
    count = 0
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if id(layer) in unlike and isinstance(layer, TritonLinear):
                setattr(owner, name, layer.dequantized())
                count += 1
    if count:
        why = "the others of the same input are of another format"
        logger.info("%d layers of few bits are plain: %s", count, why)
    return count > 0


def _are_alike(group: Sequence[Linear]) -> bool:
    codes = [linear.codes for linear in group if isinstance(linear, TritonLinear)]
    return not codes or (
        len(codes) == len(group) and all(codes[0].like(other) for other in codes[1:])
    )


def merge_layer(part: LayerParts, spec: AttentionSpec, rotary: int) -> GpuLayer:
    def vector(norm: nn.Module | None) -> torch.Tensor | None:
        weight = norm_weight(norm)
        return None if weight is None else weight[0]

    dense = isinstance(part.mlp, GatedParts)
    return GpuLayer(
        qkv=_project(part.query_key_value, vector(part.attention_norm)),
        attention_out=weight_of(part.attention_out),
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
    weight = projection.weight
    if norm is None or projection.norm is None or isinstance(weight, CodedWeight):
        return projection
    norm_weights: torch.Tensor = norm.weight.data  # type: ignore[assignment]
    adds_one = not torch.equal(norm_weights.float(), projection.norm)  # Gemma's 1 + weight
    gain = _gain(weight, projection.norm)
    weight.data.mul_(projection.norm / gain)
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


def weight_of(linear: Linear) -> Weight:
    """The weight of a layer, as it is multiplied."""
    return linear.codes if isinstance(linear, TritonLinear) else linear.weight


def _project(linears: Sequence[Linear], norm: torch.Tensor | None) -> Projection:
    plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
    coded = [linear for linear in linears if isinstance(linear, TritonLinear)]
    weight: Weight | None = _merge(plain) if len(plain) == len(linears) else None
    if len(coded) == len(linears):
        weight = merged(coded)
    if weight is None:
        raise UnrecognizedModule("its projections are of several formats")
    return Projection(weight, _merge_biases(linears), norm)


def _merge_mlp(mlp: GatedParts | nn.Module, norm: torch.Tensor | None) -> GatedMlp | nn.Module:
    if not isinstance(mlp, GatedParts):
        return mlp
    return GatedMlp(_project(mlp.gate_up, norm), weight_of(mlp.down), mlp.down.bias)


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


def _merge_biases(linears: Sequence[Linear]) -> torch.Tensor | None:
    """The merged bias; zeros where only some have one."""
    known = next((linear.bias for linear in linears if linear.bias is not None), None)
    if known is None:
        return None
    biases: list[torch.Tensor] = [
        known.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return torch.cat(biases)

"""A recognised decoder on the Triton kernels: merged projections, one kernel for each gap."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rayfin.actors.runner.fuse import probe_logits
from rayfin.actors.runner.fuse_decoder import Attending, DecoderParts, read_decoder
from rayfin.actors.runner.fuse_experts import NAMES, TOLERANCE, GroupedExperts
from rayfin.actors.runner.fuse_layers import GatedParts, LayerParts, NotRecognised, norm_weight
from rayfin.actors.runner.fused_model import Tables
from rayfin.actors.runner.paged_model import PagedModel
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.interface import PagedAttention, PagedBatch
from rayfin.kernels.cpu.decoder import DecoderShape
from rayfin.kernels.triton.layers import add_and_norm, gate, rms_norm, turn_and_write

logger = logging.getLogger(__name__)


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


class GpuModel:
    """Runs a step's packed tokens: what ``PagedModel`` does, in fewer and larger kernels.

    A layer is four matrix products, attention, and four small kernels between them. In the place of
    the last two products may be a mixture of experts: the model's own router, and `GroupedExperts`.
    """

    def __init__(
        self,
        parts: DecoderParts,
        attention: PagedAttention,
        layouts: list[KVLayout],
        dtype: torch.dtype,
    ) -> None:
        self._shape: DecoderShape = parts.shape
        self._attention = attention
        self._embedding = parts.embedding.weight
        self._head, self._head_bias = parts.head.weight, parts.head.bias
        self._final_norm = parts.final_norm
        self._rotate: Callable[[int], Tables] = parts.rotate
        self._layers = [
            _merge_layer(part, how, rotary)
            for part, how, rotary in zip(parts.layers, parts.attending, parts.rotary, strict=True)
        ]
        self._tables: Tables = []
        self._pages: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.layouts = layouts
        self.dtype = dtype

    def bind(self, cache: KVTensors) -> None:
        """From now on the layers keep their keys and values in ``cache``."""
        self._pages = list(zip(cache.keys, cache.values, strict=True))
        positions = cache.num_pages * cache.page_size  # no request is longer than all pages
        self._tables = [
            (cos.float().to(cache.device), sin.float().to(cache.device))
            for cos, sin in self._rotate(max(positions, 1))
        ]

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,  # [T] int64
        batch: PagedBatch,
        sampled: torch.Tensor,  # [S] int64, indices in T
    ) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``sampled``; the cache gets all T tokens."""
        shape = self._shape
        hidden = F.embedding(input_ids, self._embedding)
        if shape.embedding_scale != 1.0:
            hidden = hidden * shape.embedding_scale
        first = self._layers[0].attention_norm
        x = hidden if first is None else rms_norm(hidden, first, shape.eps)
        following = [layer.attention_norm for layer in self._layers[1:]] + [self._final_norm]
        for layer, pages, next_norm in zip(self._layers, self._pages, following, strict=True):
            x = self._attend(layer, pages, x, batch)
            x = add_and_norm(
                x,
                hidden,
                layer.mlp_norm,
                shape.eps,
                out_weight=layer.attention_out_norm,
                residual_scale=shape.residual_scale,
            )
            x = add_and_norm(
                self._feed_forward(layer.mlp, x),
                hidden,
                next_norm,
                shape.eps,
                out_weight=layer.mlp_out_norm,
                residual_scale=shape.residual_scale,
            )
        logits = F.linear(x.index_select(0, sampled), self._head, self._head_bias)
        if shape.logit_scale != 1.0:
            logits = logits * shape.logit_scale
        if shape.logit_softcap:
            logits = torch.tanh(logits / shape.logit_softcap) * shape.logit_softcap
        return logits

    def _attend(
        self,
        layer: GpuLayer,
        pages: tuple[torch.Tensor, torch.Tensor],
        x: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        shape = self._shape
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if shape.whole_norm:  # over all heads at once: no program of the kernel below sees them all
            assert query_norm is not None and key_norm is not None
            sizes = [len(query_norm), len(key_norm)]
            query, key, value = torch.split(qkv, [*sizes, qkv.shape[1] - sum(sizes)], dim=1)
            normed = [
                rms_norm(query, query_norm, shape.eps),
                rms_norm(key, key_norm, shape.eps),
            ]
            qkv, query_norm, key_norm = torch.cat([*normed, value], dim=1), None, None
        query = turn_and_write(
            qkv,
            query_norm,
            key_norm,
            self._tables[layer.rotary],
            batch.positions,
            batch.slots,
            *pages,
            heads=shape.heads,
            eps=shape.eps,
        )
        how = layer.how
        out = self._attention(
            query,
            *pages,
            batch,
            scale=how.scale,
            window=how.window,
            softcap=how.softcap,
            sinks=how.sinks,
        )
        return F.linear(out.flatten(1), layer.attention_out, layer.attention_out_bias)

    def _feed_forward(self, mlp: GatedMlp | nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(mlp, GatedMlp):
            mixed: torch.Tensor = mlp(x.unsqueeze(0))
            return mixed.squeeze(0)
        gate_up = F.linear(x, mlp.gate_up, mlp.gate_up_bias)
        return F.linear(gate(gate_up, NAMES[self._shape.activation]), mlp.down, mlp.down_bias)


@torch.inference_mode()
def fuse_for_gpu(paged: PagedModel, attention: PagedAttention) -> "GpuModel | None":
    """The model on Triton kernels with the same results, or None if it is not recognised.

    Mixtures are, whose experts `group_experts` has replaced.
    Merged weights take the place of the transformers model's, which stays usable: nothing is
    there twice.
    """
    name = type(paged.transformer).__name__
    if paged.dtype not in TOLERANCE:
        return None
    try:
        parts = read_decoder(paged, GroupedExperts)
    except NotRecognised as reason:
        logger.info("%s is not fused: %s", name, reason)
        return None
    fused = GpuModel(parts, attention, paged.layouts, paged.dtype)
    wanted, given = probe_logits(paged, paged), probe_logits(fused, paged)
    difference = float((given - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
    if not difference <= TOLERANCE[paged.dtype]:
        logger.warning("%s is not fused: logits would differ by %.1e", name, difference)
        return None
    return fused


def _merge_layer(part: LayerParts, how: Attending, rotary: int) -> GpuLayer:
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

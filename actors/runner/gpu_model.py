"""A recognised decoder on the Triton kernels: merged projections, one kernel for each gap."""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from rayfin.actors.runner.fuse import probe_logits
from rayfin.actors.runner.fuse_decoder import DecoderParts, read_decoder
from rayfin.actors.runner.fuse_experts import NAMES, TOLERANCE, GroupedExperts
from rayfin.actors.runner.fuse_layers import NotRecognised
from rayfin.actors.runner.fused_model import Tables
from rayfin.actors.runner.gpu_weights import GatedMlp, GpuLayer, merge_layer
from rayfin.actors.runner.paged_model import PagedModel
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.interface import PagedAttention, PagedBatch
from rayfin.kernels.cpu.decoder import DecoderShape
from rayfin.kernels.triton.layers import add_and_norm, gate, rms_norm, turn_and_write
from rayfin.kernels.triton.products import (
    DTYPES,
    FEW_ROWS,
    add_product,
    gated_product,
    normed_product,
)

logger = logging.getLogger(__name__)


class GpuModel:
    """Runs a step's packed tokens: what ``PagedModel`` does, in fewer and larger kernels.

    Of few rows, which is what decodes, a layer is six launches: the product of queries, keys and
    values with the norm before it; their norms, rotary embedding and page write; attention; the
    product that adds to the residual stream; gate and up with the norm before them and the
    activation behind; the product that adds again. Of many rows the products are torch's, with
    four small kernels between them.

    In the place of an MLP may be a mixture of experts: the model's own router around
    `GroupedExperts`.
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
            merge_layer(part, how, rotary)
            for part, how, rotary in zip(parts.layers, parts.attending, parts.rotary, strict=True)
        ]
        self._tables: Tables = []
        self._pages: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.layouts = layouts
        self.dtype = dtype
        self.few_rows = FEW_ROWS

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
        if len(hidden) <= self.few_rows and hidden.dtype in DTYPES:
            for layer, pages in zip(self._layers, self._pages, strict=True):
                self._run_few(layer, pages, hidden, batch)
            x = rms_norm(hidden.index_select(0, sampled), self._final_norm, shape.eps)
        else:
            x = self._run_many(hidden, batch).index_select(0, sampled)
        logits = F.linear(x, self._head, self._head_bias)
        if shape.logit_scale != 1.0:
            logits = logits * shape.logit_scale
        if shape.logit_softcap:
            logits = torch.tanh(logits / shape.logit_softcap) * shape.logit_softcap
        return logits

    def _run_few(
        self,
        layer: GpuLayer,
        pages: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
        batch: PagedBatch,
    ) -> None:
        """One layer; ``hidden`` [T, hidden] in place."""
        eps, mlp = self._shape.eps, layer.mlp
        qkv = normed_product(hidden, layer.attention_norm, layer.qkv, layer.qkv_bias, eps)
        heads = self._attend(layer, pages, qkv, batch)
        out, out_bias = layer.attention_out, layer.attention_out_bias
        self._add(heads, out, out_bias, layer.attention_out_norm, hidden)
        if isinstance(mlp, GatedMlp):
            activation = NAMES[self._shape.activation]
            weights = (layer.mlp_norm, mlp.gate_up, mlp.gate_up_bias)
            inner = gated_product(hidden, *weights, eps, activation)
            self._add(inner, mlp.down, mlp.down_bias, layer.mlp_out_norm, hidden)
        else:
            norm = layer.mlp_norm
            x = self._mix(mlp, hidden if norm is None else rms_norm(hidden, norm, eps))
            self._add_normed(x, layer.mlp_out_norm, None, hidden)

    def _add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_norm: torch.Tensor | None,
        hidden: torch.Tensor,
    ) -> None:
        """Few rows' product to the residual stream. A norm in between needs all of a row first."""
        if out_norm is None:
            scale = self._shape.residual_scale
            add_product(x, weight, bias, hidden, residual_scale=scale)
        else:
            y = normed_product(x, None, weight, bias, self._shape.eps)
            self._add_normed(y, out_norm, None, hidden)

    def _run_many(self, hidden: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """The final norm of the last layer's stream: [T, hidden]."""
        first, eps = self._layers[0].attention_norm, self._shape.eps
        x = hidden if first is None else rms_norm(hidden, first, eps)
        following = [layer.attention_norm for layer in self._layers[1:]] + [self._final_norm]
        for layer, pages, next_norm in zip(self._layers, self._pages, following, strict=True):
            heads = self._attend(layer, pages, F.linear(x, layer.qkv, layer.qkv_bias), batch)
            x = F.linear(heads, layer.attention_out, layer.attention_out_bias)
            x = self._add_normed(x, layer.attention_out_norm, layer.mlp_norm, hidden)
            x = self._feed_forward(layer.mlp, x)
            x = self._add_normed(x, layer.mlp_out_norm, next_norm, hidden)
        return x

    def _add_normed(
        self,
        x: torch.Tensor,
        out_norm: torch.Tensor | None,
        next_norm: torch.Tensor | None,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        scale = self._shape.residual_scale
        return add_and_norm(
            x, hidden, next_norm, self._shape.eps, out_weight=out_norm, residual_scale=scale
        )

    def _attend(
        self,
        layer: GpuLayer,
        pages: tuple[torch.Tensor, torch.Tensor],
        qkv: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """What the heads give [T, H * Dv]; ``qkv`` is [T, H * Dk + Hkv * (Dk + Dv)]."""
        shape = self._shape
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
        return out.flatten(1)

    def _feed_forward(self, mlp: GatedMlp | nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(mlp, GatedMlp):
            return self._mix(mlp, x)
        gate_up = F.linear(x, mlp.gate_up, mlp.gate_up_bias)
        return F.linear(gate(gate_up, NAMES[self._shape.activation]), mlp.down, mlp.down_bias)

    @staticmethod
    def _mix(mixture: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = mixture(x.unsqueeze(0))
        return mixed.squeeze(0)


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
    wanted = probe_logits(paged, paged)
    for few_rows in (0, FEW_ROWS):  # both ways through a layer
        fused.few_rows = few_rows
        apart = (probe_logits(fused, paged) - wanted).abs().max()
        difference = float(apart / wanted.abs().max().clamp(min=1e-6))
        if not difference <= TOLERANCE[paged.dtype]:
            logger.warning("%s is not fused: logits would differ by %.1e", name, difference)
            return None
    return fused

"""A recognized decoder on the Triton kernels: merged projections, fused kernels between them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from rayfin.actors.runner.batch import ADAPTERS, SHIFTS, StepInputs
from rayfin.actors.runner.gpu.experts import NAMES, TOLERANCE, GroupedExperts, padding_of
from rayfin.actors.runner.gpu.weights import (
    GatedMlp,
    GpuLayer,
    Projection,
    Weight,
    fold_norms,
    make_alike,
    merge_layer,
    weight_of,
)
from rayfin.actors.runner.models.inspect_decoder import DecoderSpec, inspect_decoder
from rayfin.actors.runner.models.inspect_layers import GatedParts, LayerParts, Linear, itself
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import PROBE_PAGE_SIZE, verified_replacement
from rayfin.actors.runner.models.step_model import Tables
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.shard_model import bare_share
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.attention.triton_backend import LAUNCHES, Sizes
from rayfin.kernels.cpu.decoder import DecoderShape
from rayfin.kernels.shapes import PagedAttention, PagedBatch
from rayfin.kernels.triton import quantized
from rayfin.kernels.triton.layers import Behind, add_and_norm, gate, rms_norm, rope_and_write_kv
from rayfin.kernels.triton.pdl import can_use_pdl
from rayfin.kernels.triton.products import (
    add_product,
    few_rows,
    gated_product,
    product,
    widest_row,
)
from rayfin.kernels.triton.quantized import CodedWeight
from rayfin.kernels.triton.trials import EARLY, trials


@dataclass(frozen=True, slots=True)
class ProductPlace:
    """The layers of one product, which have an input in common: queries, keys and values, ..."""

    paths: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]  # of each path


class RowAdapters(Protocol):
    """Adds what adapters add to the products of a decoder."""

    def add(
        self, place: ProductPlace, x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Adds to ``out`` [T, N] what the adapters ``rows`` [T] int64 make of ``x`` [T, K]."""


class GpuDecoder:
    """A ``StepModel`` in fewer and larger kernels.

    The norms before attention and MLP need no launch: their weights are folded into the following
    matrices, and the product is divided by the row's root mean square. With few rows (decode) a
    layer takes six launches:

    1. the product of queries, keys and values, divided;
    2. norms of heads, rotary embedding and page write;
    3. attention (two launches if decode and prefill share a step);
    4. the output product, added to the residual stream;
    5. gate and up products, divided, with the activation;
    6. the down product, added to the residual stream.

    With many rows it takes seven. torch's products are the fastest then; 4 and 6 add where they
    write the stream (beta = 1). The next kernel does what torch's products cannot: 2 divides, and
    adds the bias of 1; a kernel between 5 and 6 divides gate and up and multiplies them.

    Weights of codes (`kernels/triton/quantized.py`) have products of their own, which add to the
    stream too. Norms are not folded into codes: with two launches more, nine, for any rows.

    An MLP may be a mixture of experts: the model's module around `GroupedExperts` and its router.

    With ``pdl`` the kernels of few rows start while the ones before them end
    (`rayfin.kernels.triton.pdl`). The embedding is torch's and is launched without it: whatever a
    step's inputs are copied or computed by is complete when the first layer starts. So is the
    norm before the head, whose neighbours are torch's. With ``early_rows`` those between the
    products of many rows start early too: each begins when the product before it has ended.

    Steps with embeddings of images, other rotary positions or tokens that see later ones run on the
    modules of ``paged``, which share the weights. Steps of some adapters have ten launches more in
    each layer, and norms that are not folded.

    A rank that shares the model with ``peers`` has a part of the heads, of the MLP and of the head.
    What 4 and 6 give is summed over the ranks before it is added, which takes two launches more for
    each. Its kernels do not start early: the sums between them are NCCL's.
    """

    def __init__(
        self,
        parts: DecoderSpec,
        attention: PagedAttention,
        paged: PagedModel,
        peers: ProcessGroups | None = None,
    ) -> None:
        self._shape: DecoderShape = parts.shape
        self.attention = attention
        self._paged = paged
        self._peers = peers
        self._padding = padding_of(paged.transformer)
        self._embedding = parts.embedding.weight
        self._head, self._head_bias = weight_of(parts.head), parts.head.bias
        self._final_norm = parts.final_norm
        self._rotate: Callable[[int], Tables] = parts.rotate
        self._layers = [
            merge_layer(part, spec, rotary)
            for part, spec, rotary in zip(parts.layers, parts.attending, parts.rotary, strict=True)
        ]
        self._tables: Tables = []
        self._pages: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.layouts = paged.layouts
        self.dtype = paged.dtype
        self.places = _places(parts.layers, paged.transformer)
        self.low_rank: RowAdapters | None = None
        coded = any(layer.is_coded for layer in self._layers)
        self.few_rows = 0 if coded else few_rows(self._embedding.shape[1])
        self.pdl = False
        self.early_rows = sys.maxsize if EARLY in trials() else 0
        self.states: StateTensors | None = None
        self.replay: Callable[[StepInputs], torch.Tensor | None] | None = None
        """The residual stream of a step by recorded layers, or None if they do not hold it."""

    def attention_sizes(self) -> list[Sizes]:
        """Returns the sizes of its layers' attention, each once."""
        heads, dtype = self._shape.heads, self.dtype
        every = (
            Sizes(heads, kv.kv_heads, kv.key_dim, kv.value_dim, dtype, layer.spec.window)
            for layer, kv in zip(self._layers, self.layouts, strict=True)
        )
        return list(dict.fromkeys(every))

    @property
    def hidden_size(self) -> int:
        """Numbers of a row of the residual stream."""
        return self._embedding.shape[1]

    def starts_early(self, rows: int) -> bool:
        """Whether the kernels of a step of so many rows start before the ones before them end."""
        return self.pdl and rows <= max(self.few_rows, self.early_rows)

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``. What was recorded is over."""
        self.replay = None
        self._paged.bind(cache)
        self._pages = list(zip(cache.keys, cache.values, strict=True))
        positions = cache.num_pages * cache.page_size  # no request is longer than all pages
        self._tables = [
            (cos.float().to(cache.device), sin.float().to(cache.device))
            for cos, sin in self._rotate(max(positions, 1))
        ]

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Returns logits [S, V] of the tokens at ``inputs.sampled``; all T go into the cache."""
        batch = inputs.batch
        if inputs.given is not None or inputs.rope_positions is not None:
            return self._paged.forward(inputs)
        if batch.sees_to is not None:
            return self._paged.forward(inputs)
        stream = None if self.replay is None else self.replay(inputs)
        if stream is None:
            stream = self.stream(inputs.input_ids, batch)
        return self.logits(stream, inputs.sampled)

    def stream(self, input_ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """The residual stream [T, hidden] behind the last layer; the cache gets all T tokens."""
        hidden = F.embedding(input_ids, self._embedding)
        if self._shape.embedding_scale != 1.0:
            hidden = hidden * self._shape.embedding_scale
        if SHIFTS in batch.scratch:
            batch = replace(batch, positions=batch.positions + batch.scratch[SHIFTS])
        if ADAPTERS in batch.scratch:
            for number in range(len(self._layers)):
                self._run_adapted(number, hidden, batch)
            return hidden
        run_layer = self._run_few if len(hidden) <= self.few_rows else self._run_many
        with recorded_sums(self._peers, batch):
            for layer, pages in zip(self._layers, self._pages, strict=True):
                run_layer(layer, pages, hidden, batch)
        return hidden

    def logits(self, stream: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Returns logits [S, V] of the rows ``sampled`` [S] of the residual stream [T, hidden]."""
        shape = self._shape
        x = rms_norm(stream.index_select(0, sampled), self._final_norm, shape.eps)
        logits = multiply(x, self._head, self._head_bias)
        if self._peers is not None:
            logits = self._peers.concatenate(logits)[:, : shape.vocabulary]
        if shape.logit_scale != 1.0:
            logits = logits * shape.logit_scale
        if shape.logit_softcap:
            logits = torch.tanh(logits / shape.logit_softcap) * shape.logit_softcap
        return logits

    def fold_norms(self, parts: list[LayerParts]) -> None:
        """Folds norms into the weights, which the modules ``parts`` share."""
        if self._shape.whole_norm:  # these norms come before the division
            return
        pairs = zip(self._layers, parts, strict=True)
        self._layers = [fold_norms(layer, part) for layer, part in pairs]

    def _run_few(
        self,
        layer: GpuLayer,
        pages: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
        batch: PagedBatch,
    ) -> None:
        """One layer of few rows; ``hidden`` [T, hidden] in place."""
        eps, qkv, mlp, pdl = self._shape.eps, layer.qkv, layer.mlp, self.pdl
        assert isinstance(qkv.weight, torch.Tensor), "codes have the kernels of many rows"
        x = self._normed(qkv.norm, hidden, pdl)
        x = product(x, qkv.weight, qkv.bias, gain=qkv.gain, eps=eps, pdl=pdl)
        heads = self._attend(layer, pages, x, None, batch, pdl)
        out, out_bias = layer.attention_out, layer.attention_out_bias
        self._add(heads, out, out_bias, layer.attention_out_norm, hidden)
        if not isinstance(mlp, GatedMlp):
            self._add_mixed(layer, mlp, hidden, batch)
            return
        both, activation = mlp.gate_up, NAMES[self._shape.activation]
        assert isinstance(both.weight, torch.Tensor)
        x = self._normed(both.norm, hidden, pdl)
        x = gated_product(x, both.weight, both.bias, activation, gain=both.gain, eps=eps, pdl=pdl)
        self._add(x, mlp.down, mlp.down_bias, layer.mlp_out_norm, hidden)

    def _run_many(
        self,
        layer: GpuLayer,
        pages: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
        batch: PagedBatch,
    ) -> None:
        """One layer of many rows; ``hidden`` [T, hidden] in place."""
        eps, mlp, pdl = self._shape.eps, layer.mlp, self.starts_early(len(hidden))
        heads = self._attend(layer, pages, *self._project(layer.qkv, hidden, pdl), batch, pdl)
        out, out_bias = layer.attention_out, layer.attention_out_bias
        self._add_many(heads, out, out_bias, layer.attention_out_norm, hidden, pdl)
        if not isinstance(mlp, GatedMlp):
            self._add_mixed(layer, mlp, hidden, batch)
            return
        gate_up, behind = self._project(mlp.gate_up, hidden, pdl)
        x = gate(gate_up, NAMES[self._shape.activation], eps=eps, behind=behind, pdl=pdl)
        self._add_many(x, mlp.down, mlp.down_bias, layer.mlp_out_norm, hidden, pdl)

    def _run_adapted(self, number: int, hidden: torch.Tensor, batch: PagedBatch) -> None:
        """Layer ``number`` with the adapters of some rows; ``hidden`` [T, hidden] in place."""
        layer, mlp, rows = self._layers[number], self._layers[number].mlp, batch.scratch[ADAPTERS]
        qkv, out, gate_up, down = self.places[number]
        assert self.low_rank is not None and isinstance(mlp, GatedMlp)
        x = self._normed(layer.qkv.norm, hidden)
        y = multiply(x, layer.qkv.weight, layer.qkv.bias)
        self.low_rank.add(qkv, x, y, rows)
        x = self._attend(layer, self._pages[number], y, None, batch)
        y = multiply(x, layer.attention_out, layer.attention_out_bias)
        self.low_rank.add(out, x, y, rows)
        self._add_normed(y, layer.attention_out_norm, hidden)
        x = self._normed(mlp.gate_up.norm, hidden)
        y = multiply(x, mlp.gate_up.weight, mlp.gate_up.bias)
        self.low_rank.add(gate_up, x, y, rows)
        x = gate(y, NAMES[self._shape.activation])
        y = multiply(x, mlp.down, mlp.down_bias)
        self.low_rank.add(down, x, y, rows)
        self._add_normed(y, layer.mlp_out_norm, hidden)

    def _project(
        self, projection: Projection, hidden: torch.Tensor, pdl: bool
    ) -> tuple[torch.Tensor, Behind | None]:
        """Many rows' product [T, N], and its unfinished part for the next kernel."""
        if projection.gain is None:
            x = self._normed(projection.norm, hidden, pdl)
            return multiply(x, projection.weight, projection.bias), None
        left = Behind(hidden, projection.gain, projection.bias)
        return multiply(hidden, projection.weight, None), left

    def _normed(
        self, norm: torch.Tensor | None, hidden: torch.Tensor, pdl: bool = False
    ) -> torch.Tensor:
        return hidden if norm is None else rms_norm(hidden, norm, self._shape.eps, pdl=pdl)

    def _add(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        out_norm: torch.Tensor | None,
        hidden: torch.Tensor,
    ) -> None:
        """Adds few rows' product to the residual stream; an ``out_norm`` takes another launch."""
        if x.shape[1] > widest_row(len(x)) or isinstance(weight, CodedWeight):
            self._add_many(x, weight, bias, out_norm, hidden)
        elif self._peers is not None:
            self._add_normed(self._peers.sum(product(x, weight, bias)), out_norm, hidden)
        elif out_norm is None:
            scale = self._shape.residual_scale
            add_product(x, weight, bias, hidden, residual_scale=scale, pdl=self.pdl)
        else:
            self._add_normed(product(x, weight, bias, pdl=self.pdl), out_norm, hidden, self.pdl)

    def _add_many(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        out_norm: torch.Tensor | None,
        hidden: torch.Tensor,
        pdl: bool = False,
    ) -> None:
        """Adds many rows' product to the residual stream."""
        scale = self._shape.residual_scale
        if self._peers is not None:
            self._add_normed(self._peers.sum(multiply(x, weight, bias)), out_norm, hidden)
        elif out_norm is None and isinstance(weight, CodedWeight):
            quantized.add_product(x, weight, bias, hidden, residual_scale=scale)
        elif out_norm is None and bias is None and isinstance(weight, torch.Tensor):
            hidden.addmm_(x, weight.t(), alpha=scale)
        else:
            self._add_normed(multiply(x, weight, bias), out_norm, hidden, pdl)

    def _add_mixed(
        self, layer: GpuLayer, mixture: nn.Module, hidden: torch.Tensor, batch: PagedBatch
    ) -> None:
        x = self._normed(layer.mlp_norm, hidden)
        with self._padding.of(batch):
            given: torch.Tensor | tuple[torch.Tensor, ...] = mixture(x.unsqueeze(0))
        mixed = given if isinstance(given, torch.Tensor) else given[0]  # gpt-oss: scores too
        self._add_normed(mixed.squeeze(0), layer.mlp_out_norm, hidden)

    def _add_normed(
        self,
        x: torch.Tensor,
        out_norm: torch.Tensor | None,
        hidden: torch.Tensor,
        pdl: bool = False,
    ) -> None:
        eps, scale = self._shape.eps, self._shape.residual_scale
        add_and_norm(x, hidden, None, eps, out_weight=out_norm, residual_scale=scale, pdl=pdl)

    def _attend(
        self,
        layer: GpuLayer,
        pages: tuple[torch.Tensor, torch.Tensor],
        qkv: torch.Tensor,
        behind: Behind | None,
        batch: PagedBatch,
        pdl: bool = False,
    ) -> torch.Tensor:
        """Attention output [T, H * Dv]; ``qkv`` is [T, H * Dk + Hkv * (Dk + Dv)]."""
        shape = self._shape
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if shape.whole_norm:  # over all heads, which no program of the next kernel has
            assert query_norm is not None and key_norm is not None
            sizes = [len(query_norm), len(key_norm)]
            query, key, value = torch.split(qkv, [*sizes, qkv.shape[1] - sum(sizes)], dim=1)
            normed = [
                rms_norm(query, query_norm, shape.eps, pdl=pdl),
                rms_norm(key, key_norm, shape.eps, pdl=pdl),
            ]
            qkv, query_norm, key_norm = torch.cat([*normed, value], dim=1), None, None
        query = rope_and_write_kv(
            qkv,
            query_norm,
            key_norm,
            self._tables[layer.rotary],
            batch.positions,
            batch.slots,
            *pages,
            heads=shape.heads,
            eps=shape.eps,
            behind=behind,
            pdl=pdl,
        )
        spec = layer.spec
        out = self.attention(
            query,
            *pages,
            batch,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=spec.sinks,
        )
        return out.flatten(1)


def _places(layers: list[LayerParts], model: nn.Module) -> list[tuple[ProductPlace, ...]]:
    """Returns the four products of each layer; fewer if its MLP is a mixture."""
    paths = {module: path for path, module in model.named_modules()}

    def place(*linears: Linear) -> ProductPlace:
        outputs = tuple(linear.out_features for linear in linears)
        return ProductPlace(tuple(paths[one] for one in linears), linears[0].in_features, outputs)

    return [
        (
            place(*layer.query_key_value),
            place(layer.attention_out),
            *(
                (place(*layer.mlp.gate_up), place(layer.mlp.down))
                if isinstance(layer.mlp, GatedParts)
                else ()
            ),
        )
        for layer in layers
    ]


def recorded_sums(peers: ProcessGroups | None, batch: PagedBatch) -> AbstractContextManager[None]:
    """Leaves sums over ranks uncounted within it, if a graph repeats the layers of ``batch``."""
    return peers.uncounted() if peers is not None and LAUNCHES in batch.scratch else nullcontext()


def multiply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b: [T, N]."""
    if isinstance(weight, CodedWeight):
        return quantized.product(x, weight, bias)
    return F.linear(x, weight, bias)


@torch.inference_mode()
def build_gpu_decoder(
    paged: PagedModel,
    attention: PagedAttention,
    page_size: int = PROBE_PAGE_SIZE,
    *,
    fold: bool = True,
    peers: ProcessGroups | None = None,
) -> "GpuDecoder | None":
    """The model on Triton kernels, or None if it is not recognized or its results differ.

    Mixtures are recognized after `group_experts` has replaced their experts.
    The merged weights replace the transformers model's, which shares them and stays usable. With
    folded norms weights are rounded once, instead of each activation.

    Args:
        fold: False if something reads what norms give to the layers behind them.
        peers: of a rank that shares the layers; all of them build a decoder, or none does.
    """
    if paged.dtype not in TOLERANCE:
        return None
    bare = itself if peers is None else bare_share
    all_agree = bool if peers is None else peers.all_agree

    def build() -> Iterator[GpuDecoder]:
        parts = inspect_decoder(paged, GroupedExperts, bare)
        if make_alike(paged.transformer, parts.layers):
            parts = inspect_decoder(paged, GroupedExperts, bare)
        decoder = GpuDecoder(parts, attention, paged, peers)
        few, decoder.few_rows = decoder.few_rows, 0
        yield decoder  # before norms are folded: until then the transformers model is unchanged
        if fold:
            decoder.fold_norms(parts.layers)
            yield decoder
        decoder.few_rows = few
        yield decoder
        if peers is None and can_use_pdl(paged.device):
            decoder.pdl = True
            yield decoder

    return verified_replacement(paged, build, TOLERANCE[paged.dtype], page_size, all_agree)

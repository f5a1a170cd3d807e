"""Quantised layers on the compiled CPU kernels, their weights as small as in the checkpoint."""

import logging
from typing import Any

import torch
from torch import nn

from rayfin.actors.runner.quantized.experts import quant_experts
from rayfin.actors.runner.quantized.linear import (
    HeadEmbedding,
    QuantEmbedding,
    QuantWeight,
    ScaledEmbedding,
    SmallEmbedding,
    SmallLinear,
    inside_head,
)
from rayfin.actors.runner.quantized.loader import formats_of, quant_embeddings, quant_linears
from rayfin.kernels.cpu.codes import (
    ROUNDED_GROUP,
    SPAN,
    CodedMatrix,
    cut_codes,
    pack_codes,
    stack_codes,
)
from rayfin.kernels.cpu.kernels import CpuKernels

logger = logging.getLogger(__name__)

INT4_BYTES = 0.5 + (2 + 4 / SPAN) / ROUNDED_GROUP
"""Of a weight with its share of a scale and a least number."""


class CodedLinear(SmallLinear):
    """y = x W^T + b of a weight of codes, in the dtype of x: exact but for the order of sums."""

    def __init__(
        self,
        kernels: CpuKernels,
        matrix: CodedMatrix,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._own: CodedMatrix | None = matrix
        self._merged: tuple[CodedMatrix, int] | None = None  # and the first output there
        self.out_features, self.in_features = matrix.outputs, matrix.inputs
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        # Some models ask for its type; a product with it fails.
        self.weight = torch.empty(matrix.outputs, matrix.inputs, dtype=dtype, device="meta")

    @property
    def matrix(self) -> CodedMatrix:
        """The weight; cut out of the merged one if it lies there."""
        if self._own is None:
            assert self._merged is not None
            self._own = cut_codes(self._kernels, *self._merged, self.out_features)
            self._merged = None
        return self._own

    @property
    def rounds_rows(self) -> bool:
        matrix = self._merged[0] if self._own is None and self._merged else self._own
        return matrix is not None and matrix.rounds_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        bias = None if self.bias is None else self.bias.float()
        y = self._kernels.matmul(rows, self.matrix, bias=bias)
        return y.view(*x.shape[:-1], y.shape[-1]).to(x.dtype)


class CodedEmbedding(SmallEmbedding):
    """An embedding of a table of codes, which may be the weight of the head."""

    def __init__(self, matrix: CodedMatrix, dtype: torch.dtype, scale: float) -> None:
        super().__init__()
        self.matrix, self._dtype, self.scale = matrix, dtype, scale
        self.num_embeddings, self.embedding_dim = matrix.outputs, matrix.inputs
        self.weight = torch.empty(matrix.outputs, matrix.inputs, dtype=dtype, device="meta")
        # transformers takes a model's device and dtype from a parameter, and there may be no other.
        self.marker = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the table: [...] int64 -> [..., embedding_dim]."""
        rows = self.matrix.rows(tokens.flatten())
        return rows.view(*tokens.shape, self.embedding_dim).to(self._dtype)


def merged(layers: list[CodedLinear], *, paired: bool = False) -> CodedMatrix | None:
    """One matrix of the layers, which keep none of their own, or None if they are not alike."""
    first = layers[0].matrix
    if len(layers) == 1 and not paired:
        return first
    if not all(first.like(layer.matrix) for layer in layers):
        return None
    whole = stack_codes(layers[0]._kernels, [layer.matrix for layer in layers], paired=paired)
    start = 0
    for layer in layers:
        layer._own, layer._merged = None, (whole, start)
        start += layer.out_features
    return whole


def pack_quantized(model: nn.Module, kernels: CpuKernels, *, round_rows: bool = False) -> int:
    """Replaces the quantised layers, one after the other, and returns the bytes of their weights.

    Layers of codes that the kernels do not read become plain. ``round_rows`` as ``pack_codes``.
    """
    embeddings, layers, plain, size = quant_embeddings(model), quant_linears(model), 0, 0
    by_id: dict[int, CodedLinear | nn.Linear] = {}  # of the tables of embeddings
    tables = {id(one.table) for _, _, one in embeddings}
    while layers:
        owner, name, layer = layers.pop()
        matrix = pack_codes(kernels, layer.grouped(), round_rows=round_rows)
        if matrix is None:
            plain += 1
            packed: CodedLinear | nn.Linear = layer.dequantized()
        else:
            size += matrix.bytes
            packed = CodedLinear(kernels, matrix, layer.bias, layer.dtype)
        setattr(owner, name, packed)
        if id(layer) in tables:
            by_id[id(layer)] = packed
    for owner, name, one in embeddings:
        embedding = _packed_embedding(kernels, one, by_id.get(id(one.table)))
        if isinstance(one, QuantEmbedding) and isinstance(embedding, CodedEmbedding):
            size += embedding.matrix.bytes
        setattr(owner, name, embedding)
    if size:
        logger.info("quantized weights stay in %d MiB", size >> 20)
    if plain:
        logger.warning("%d layers of codes that no kernel reads are plain", plain)
    return size


def _packed_embedding(
    kernels: CpuKernels,
    embedding: QuantEmbedding | HeadEmbedding,
    head: CodedLinear | nn.Linear | None,
) -> CodedEmbedding | nn.Embedding:
    """The embedding of a table, which ``head`` has packed if it is its weight."""
    table, scale = embedding.table, embedding.scale
    if isinstance(head, nn.Linear):
        return ScaledEmbedding(head.weight.detach(), scale)
    matrix = pack_codes(kernels, table.grouped()) if head is None else head.matrix
    if matrix is None:
        return ScaledEmbedding(table.weight_in(table.dtype), scale)
    return CodedEmbedding(matrix, table.dtype, scale)


def rounds_rows(model: nn.Module) -> bool:
    """Whether some layer rounds the rows that it multiplies."""
    layers = (layer for layer in model.modules() if isinstance(layer, SmallLinear))
    return any(layer.rounds_rows for layer in layers)


def quantized_parameters(model: nn.Module) -> int:
    """The weights of layers that are still quantised, which are no parameters to torch."""
    linear = sum(
        layer.out_features * layer.in_features
        for layer in model.modules()
        if isinstance(layer, QuantWeight | SmallLinear)
    )
    return linear + sum(mixture.weights for _, _, mixture in quant_experts(model))


def int4_saves(model: Any, dtype: object) -> int:
    """About how many bytes the plain layers of a model would be smaller in 4 bits on a CPU.

    The kernels keep weights in 16 bits if the checkpoint's ``dtype`` is bfloat16, else in 32.
    """
    if formats_of(model) is not None:
        return 0  # a quantized checkpoint is not rounded
    stored = 2 if dtype == torch.bfloat16 else 4
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    head = inside_head(model)
    weights = sum(layer.weight.numel() for layer in layers if layer not in head)
    experts = (
        weight for weight in model.parameters() if weight.dim() == 3 and min(weight.shape) > 1
    )
    weights += sum(weight.numel() for weight in experts)
    return int(weights * (stored - INT4_BYTES))

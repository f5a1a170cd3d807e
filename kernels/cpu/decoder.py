"""Runs a Llama-like decoder in one call of the compiled kernels (kernels/cpu/layers/decoder.h).

A step is one C call in which the threads stay awake: no operator is dispatched, nothing is
allocated, and small operations cost what their arithmetic costs.
"""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rayfin.kernels.cpu.attention import sees_to, step_lengths
from rayfin.kernels.cpu.kernels import STORAGES, Activation, CpuKernels, Matrix
from rayfin.kernels.cpu.low_rank import AdapterRows
from rayfin.kernels.shapes import GroupedTables, PagedBatch


@dataclass(slots=True)
class DecoderLayer:
    """One layer's weights and settings. Vectors are float32; None means absent."""

    qkv: Matrix  # query, key and value heads, stacked, but those of `qkv_rest`
    attention_out: Matrix
    gate_up: Matrix  # paired
    down: Matrix
    scale: float  # factor on attention scores
    qkv_rest: Matrix | None = None  # the last of these heads, where they are stored in another way
    attention_norm: torch.Tensor | None = None  # [hidden], before attention
    attention_out_norm: torch.Tensor | None = None  # [hidden], after it
    mlp_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    attention_out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None  # [key_dim], or [heads * key_dim] with whole_norm
    key_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]
    window: int | None = None
    softcap: float | None = None
    rotary: int = 0  # index of the layer's tables in ``PackedDecoder.set_rope_tables``

    @property
    def matrices(self) -> list[Matrix]:
        """All of its matrices."""
        each = (self.qkv, self.qkv_rest, self.attention_out, self.gate_up, self.down)
        return [matrix for matrix in each if matrix is not None]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and factors that all layers share."""

    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    eps: float
    activation: Activation
    whole_norm: bool = False  # query and key norms run over all heads at once
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0


_VECTORS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
_MATRICES = ("qkv", "qkv_rest", "attention_out", "gate_up", "down")
_MORE_VECTORS = (
    *("qkv_bias", "attention_out_bias", "gate_up_bias", "down_bias"),
    *("query_norm", "key_norm", "sinks"),
)
_SIZES = ("heads", "kv_heads", "key_dim", "value_dim", "rotary_dim")
_FACTORS = ("eps", "embedding_scale", "residual_scale", "logit_scale", "logit_softcap")


def _fields(
    pointers: tuple[str, ...], integers: tuple[str, ...], floats: tuple[str, ...]
) -> list[tuple[str, type]]:
    return [
        *((name, ctypes.c_void_p) for name in pointers),
        *((name, ctypes.c_int64) for name in integers),
        *((name, ctypes.c_float) for name in floats),
    ]


class _Layer(ctypes.Structure):
    _fields_ = _fields(
        (*_VECTORS, *_MATRICES, *_MORE_VECTORS, "cos", "sin", "k_pages", "v_pages"),
        ("window", "group"),
        ("scale", "softcap"),
    )


class _Decoder(ctypes.Structure):
    _fields_ = _fields(
        ("layers", "embedding", "head", "final_norm", "head_bias"),
        (
            *("layer_count", "hidden", "intermediate", "vocabulary"),
            *(*_SIZES, "storage", "whole_norm", "activation"),
        ),
        _FACTORS,
    )


class _Step(ctypes.Structure):
    _fields_ = _fields(
        (
            *("tokens", "positions", "slots", "sampled", "page_tables", "query_start", "kv_len"),
            *("logits", "workspace", "given", "adapters", "sampled_adapters"),
            *("tap_layers", "taps", "added", "sees_to"),
        ),
        (
            *("count", "sampled_count", "table_stride", "rows", "decoding", "page_size"),
            *("tap_count", "added_layers", "group_tables", "group_slots"),
        ),
        (),
    )


class PackedDecoder:
    """Packed weights, bound pages, and a workspace that grows to the largest step."""

    def __init__(
        self,
        kernels: CpuKernels,
        shape: DecoderShape,
        layers: list[DecoderLayer],
        *,
        embedding: Matrix,  # [vocabulary, hidden]; may be `head`
        head: Matrix,
        final_norm: torch.Tensor | None,
        head_bias: torch.Tensor | None = None,
    ) -> None:
        self._kernels = kernels
        self.layers, self.head = layers, head  # kept: the structs hold addresses
        self.embedding, self.final_norm, self.head_bias = embedding, final_norm, head_bias
        self._rotary = [layer.rotary for layer in layers]
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pages: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._workspace = torch.empty(0)
        self._tap_layers = torch.empty(0, dtype=torch.int64)
        self.tapped = torch.empty(0)  # of the last step, with ``tap``
        self.shape = shape
        self._layers = (_Layer * len(layers))(*(_layer_struct(layer) for layer in layers))
        decoder = self._decoder = _Decoder(
            layers=ctypes.addressof(self._layers),
            embedding=embedding.handle,
            head=head.handle,
            final_norm=_address(final_norm),
            head_bias=_address(head_bias),
            layer_count=len(layers),
        )
        for name in (*_SIZES, *_FACTORS, "hidden", "intermediate", "vocabulary"):
            setattr(decoder, name, getattr(shape, name))
        decoder.whole_norm, decoder.activation = int(shape.whole_norm), int(shape.activation)

    @property
    def positions(self) -> int:
        """The number of positions of the rotary tables."""
        return len(self._tables[0][0]) if self._tables else 0

    def set_rope_tables(self, tables: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Sets the cosines and sines [positions, rotary_dim / 2], one pair per kind of layer."""
        self._tables = [(cos.float().contiguous(), sin.float().contiguous()) for cos, sin in tables]
        for layer, kind in zip(self._layers, self._rotary, strict=True):
            layer.cos, layer.sin = (table.data_ptr() for table in self._tables[kind])

    def replace_layer(self, index: int, layer: DecoderLayer) -> None:
        """Puts other weights of the same sizes in the place of a layer's, which are freed."""
        old, new = self._layers[index], _layer_struct(layer)
        for name in ("cos", "sin", "k_pages", "v_pages", "group"):
            setattr(new, name, getattr(old, name))
        self._layers[index], self.layers[index] = new, layer

    def replace_ends(
        self,
        *,
        embedding: Matrix,
        head: Matrix,
        final_norm: torch.Tensor | None,
        head_bias: torch.Tensor | None,
        embedding_scale: float,
    ) -> None:
        """The same for all that is before and behind the layers."""
        self.embedding, self.head = embedding, head
        self.final_norm, self.head_bias = final_norm, head_bias
        self.shape = replace(self.shape, embedding_scale=embedding_scale)
        decoder = self._decoder
        decoder.embedding, decoder.head = embedding.handle, head.handle
        decoder.final_norm, decoder.head_bias = _address(final_norm), _address(head_bias)
        decoder.embedding_scale = embedding_scale

    @property
    def wide_numbers(self) -> int:
        """Numbers in matrices of 32 bits."""
        within = [matrix for layer in self.layers for matrix in layer.matrices]
        each = dict.fromkeys([*within, self.embedding, self.head])
        return sum(
            matrix.outputs * matrix.inputs for matrix in each if matrix.storage == torch.float32
        )

    def tap(self, layers: Sequence[int]) -> None:
        """Makes each step copy the inputs of these ``layers``, rising, into ``tapped``.

        The number of layers stands for what the last one gives.

        ``tapped`` is [T, len(layers) * hidden] float32, each token's inputs one after the other.
        """
        assert list(layers) == sorted(set(layers)) and layers[-1] <= len(self._layers)
        self._tap_layers = torch.tensor(layers, dtype=torch.int64)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """What the final norm makes of ``x`` [N, hidden]."""
        if self.final_norm is None:
            return x
        return self._kernels.rms_norm(x, self.final_norm, self.shape.eps)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """The logits [N, vocabulary] of normed ``x`` [N, hidden], not capped."""
        scale = self.shape.logit_scale
        return self._kernels.matmul(x, self.head, bias=self.head_bias, alpha=scale)

    def bind(
        self,
        k_pages: list[torch.Tensor],
        v_pages: list[torch.Tensor],
        group: Sequence[int] | None = None,
    ) -> None:
        """Makes layer i keep its keys and values in k_pages[i] and v_pages[i].

        ``group`` has the number of each layer's page tables; None: all read the same.
        """
        self._pages = (k_pages, v_pages)
        self._decoder.storage = STORAGES[k_pages[0].dtype]
        for layer, k, v in zip(self._layers, k_pages, v_pages, strict=True):
            layer.k_pages, layer.v_pages = k.data_ptr(), v.data_ptr()
        for layer, number in zip(self._layers, group or (), strict=group is not None):
            layer.group = number

    def run(
        self,
        tokens: torch.Tensor,  # [T] int64
        batch: PagedBatch,
        sampled: torch.Tensor,  # [S] int64, indices in T
        given: torch.Tensor | None = None,  # [G, hidden] float32
        added: torch.Tensor | None = None,  # [G, L, hidden] float32
        tables: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        adapters: "StepAdapters | None" = None,
    ) -> torch.Tensor:
        """The logits [S, vocabulary] of the tokens at ``sampled``; the pages get all T tokens.

        Token -1 - g stands for row g of ``given``, which is taken in place of an embedding;
        layer l < L adds row (g, l) of ``added`` to what it gives for that token.
        With ``tables`` of this step alone, ``batch.positions`` are their rows.
        """
        if tables is not None:
            common = self._tables
            self.set_rope_tables(tables)
            try:
                return self._run(tokens, batch, sampled, given, adapters, added)
            finally:
                self.set_rope_tables(common)
        assert int(step_lengths(batch)[1].max(initial=0)) <= self.positions
        return self._run(tokens, batch, sampled, given, adapters, added)

    def _run(
        self,
        tokens: torch.Tensor,
        batch: PagedBatch,
        sampled: torch.Tensor,
        given: torch.Tensor | None,
        adapters: "StepAdapters | None",
        added: torch.Tensor | None,
    ) -> torch.Tensor:
        for rows in (given, added):
            assert rows is None or (rows.dtype == torch.float32 and rows.is_contiguous())
        starts, lengths = step_lengths(batch)
        assert batch.page_tables.dtype == torch.int32 and batch.page_tables.stride(1) == 1
        tables, slots = batch.page_tables, batch.slots
        if batch.groups is not None:
            tables, slots = batch.groups.page_tables, batch.groups.slots
        assert tables.is_contiguous() or batch.groups is None
        ints = (tokens, batch.positions, slots, sampled)
        assert all(values.dtype == torch.int64 and values.is_contiguous() for values in ints)
        logits = torch.empty(len(sampled), self.shape.vocabulary)
        taps: torch.Tensor | None = None
        if len(self._tap_layers):
            taps = torch.empty(len(tokens), len(self._tap_layers) * self.shape.hidden)
        addresses = itertools.chain(
            (values.data_ptr() for values in ints),
            (tables.data_ptr(), starts.ctypes.data, lengths.ctypes.data),
            (logits.data_ptr(), None, _address(given)),
            (None, None) if adapters is None else adapters.addresses(len(tokens), len(sampled)),
            (self._tap_layers.data_ptr(), _address(taps), _address(added), sees_to(batch)),
        )
        step = _Step(
            *addresses,
            len(tokens),
            len(sampled),
            batch.page_tables.stride(0),
            batch.rows,
            batch.decoding,
            batch.page_size,
            len(self._tap_layers),
            0 if added is None else added.shape[1],
            *((0, 0) if batch.groups is None else _group_strides(batch.groups)),
        )
        library, decoder = self._kernels.library, ctypes.byref(self._decoder)
        needed = library.rayfin_decoder_workspace(decoder, ctypes.byref(step))
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed)
        step.workspace = self._workspace.data_ptr()
        library.rayfin_decoder_run(self._kernels.pool, decoder, ctypes.byref(step))
        if taps is not None:
            self.tapped = taps
        return logits


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step's tokens, and of those at ``sampled``."""

    tokens: AdapterRows
    sampled: AdapterRows

    def addresses(self, tokens: int, sampled: int) -> tuple[int, int]:
        """Of both structs."""
        assert (self.tokens.count, self.sampled.count) == (tokens, sampled)
        return self.tokens.address, self.sampled.address


def _layer_struct(layer: DecoderLayer) -> _Layer:
    struct = _Layer(window=layer.window or 0, scale=layer.scale, softcap=layer.softcap or 0.0)
    for name in (*_VECTORS, *_MORE_VECTORS):
        vector: torch.Tensor | None = getattr(layer, name)
        if vector is not None:
            assert vector.dtype == torch.float32 and vector.is_contiguous()
        setattr(struct, name, _address(vector))
    for name in _MATRICES:
        matrix: Matrix | None = getattr(layer, name)
        setattr(struct, name, None if matrix is None else matrix.handle)
    return struct


def _group_strides(groups: GroupedTables) -> tuple[int, int]:
    return groups.page_tables.stride(0), groups.slots.stride(0)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

"""Puts a recognized transformers model on one call of the compiled kernels per step.

The transformers model is the reference. Its structure gives the weights, a forward through it gives
the attention settings and the scale of embeddings, and at the end both compute the same prompt: if
their logits differ, the transformers model is used. A model that is to be quantized is compared
with its exact weights first.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.cpu.layer_by_layer import LayerByLayer
from rayfin.actors.runner.models.inspect_decoder import AttentionSpec, inspect_decoder
from rayfin.actors.runner.models.inspect_layers import GatedParts, LayerParts, Linear, norm_weight
from rayfin.actors.runner.models.mapped_weights import packed
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import (
    Replaceable,
    accepted_difference,
    verified_replacement,
)
from rayfin.actors.runner.quantized.packed import CodedEmbedding, CodedLinear, merged
from rayfin.actors.settings.choices import Quantization
from rayfin.kernels.cpu.codes import pack_int4, pack_int6, pack_int8
from rayfin.kernels.cpu.decoder import DecoderLayer, PackedDecoder
from rayfin.kernels.cpu.kernels import CpuKernels, Matrix, Pack
from rayfin.kernels.cpu.low_rank import Place, Places

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""The largest difference of logits that is accepted, as a share of the largest logit."""


@dataclass(frozen=True)
class Packing:
    """How weights are stored; embeddings share the head's storage where they are its weight.

    Rounded value and down projections cost the most, so these may be finer, and what lies in one
    matrix with values.
    """

    layers: Pack
    head: Pack
    qkv: Pack
    down: Pack

    def of(self, name: str) -> "Packing":
        """That of a layer by itself, by the last part of its name."""
        if name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            return replace(self, layers=self.qkv)
        return replace(self, layers=self.down) if name == "down_proj" else self


def packing(
    kernels: CpuKernels,
    quantization: Quantization | None = None,
    spares: list[Matrix] | None = None,
) -> Packing:
    """Returns the storage for a ``--quantization``; without one weights stay exact.

    Args:
        spares: exact matrices that may be filled with other weights.
    """
    # Rows in 8 bits would cost a quarter of all that int8 loses in a head's product, and another
    # one in that of values.
    two_bytes = partial(pack_int8, kernels, row_bytes=2)
    if quantization == "int4":
        fine = partial(pack_int6, kernels)
        return Packing(partial(pack_int4, kernels), two_bytes, fine, fine)
    if quantization == "int8":
        one_byte = partial(pack_int8, kernels)
        return Packing(one_byte, two_bytes, two_bytes, one_byte)
    exact = partial(kernels.pack, spares=spares)
    return Packing(exact, exact, exact, exact)


def tolerance_of(paged: Replaceable) -> float:
    """The difference of logits up to which kernels may take the place of a model's modules."""
    return accepted_difference(paged.transformer, TOLERANCE[paged.dtype])


def build_cpu_decoder(
    paged: PagedModel, kernels: CpuKernels, quantization: Quantization | None = None
) -> CpuDecoder | None:
    """The model on compiled kernels, or None if it is not recognized or its results differ.

    With ``quantization`` the weights are rounded after the comparison, which holds exact ones of
    one layer at a time.
    """
    tolerance = tolerance_of(paged)
    if not quantization:
        exact = packing(kernels)
        return verified_replacement(paged, lambda: [_build(paged, kernels, exact)], tolerance)
    if verified_replacement(paged, lambda: [_layer_by_layer(paged, kernels)], tolerance) is None:
        return None
    return _build(paged, kernels, packing(kernels, quantization))


def _layer_by_layer(paged: PagedModel, kernels: CpuKernels) -> LayerByLayer:
    parts, exact = inspect_decoder(paged), packing(kernels)

    def pack(index: int) -> DecoderLayer:
        part, spec = parts.layers[index], parts.attending[index]
        return pack_layer(kernels, part, spec, parts.rotary[index], exact)

    return LayerByLayer(kernels, parts, pack, paged.layouts, paged.dtype)


def _build(paged: PagedModel, kernels: CpuKernels, packing: Packing) -> CpuDecoder:
    parts = inspect_decoder(paged)
    layers = [
        pack_layer(kernels, part, spec, parts.rotary[index], packing)
        for index, (part, spec) in enumerate(zip(parts.layers, parts.attending, strict=True))
    ]
    embedding, lm_head = parts.embedding, parts.head
    head = pack_head(lm_head, packing)
    plain = isinstance(lm_head, nn.Linear)
    if isinstance(embedding, CodedEmbedding):
        table: Matrix = embedding.matrix
    elif plain and lm_head.weight.data_ptr() == embedding.weight.data_ptr():
        table = head
    else:
        table = packed(kernels.pack, [embedding.weight])
    return CpuDecoder(
        PackedDecoder(
            kernels,
            parts.shape,
            layers,
            embedding=table,
            head=head,
            final_norm=parts.final_norm,
            head_bias=_float(lm_head.bias),
        ),
        parts.rotate,
        parts.rotate_at,
        paged.layouts,
        paged.dtype,
        _places(paged.transformer, parts.layers),
    )


def _places(model: nn.Module, layers: list[LayerParts]) -> Places:
    """Where the linear layers lie in the merged projections, in the kernels' order."""
    paths = {id(module): path for path, module in model.named_modules()}
    places: list[list[Place]] = []
    for layer in layers:
        assert isinstance(layer.mlp, GatedParts)
        gate_up, down = layer.mlp.gate_up, [layer.mlp.down]
        for linears in (layer.query_key_value, [layer.attention_out], gate_up, down):
            first, merged = 0, []
            for linear in linears:
                merged.append(Place(paths[id(linear)], first, linear.out_features))
                first += linear.out_features
            places.append(merged)
    return places


def pack_head(head: Linear, packing: Packing) -> Matrix:
    """The head's weight."""
    return _packed([head], packing.head)


def pack_layer(
    kernels: CpuKernels,
    part: LayerParts,
    spec: AttentionSpec,
    rotary: int,
    packing: Packing,
) -> DecoderLayer:
    """A layer's weights, and what its attention is like."""

    def vector(norm: nn.Module | None) -> torch.Tensor | None:
        weight = norm_weight(norm)
        return None if weight is None else weight[0]

    def pack(linears: list[Linear], paired: bool = False) -> Matrix:
        return _packed(linears, packing.layers, paired=paired)

    assert isinstance(part.mlp, GatedParts)  # inspect_decoder accepts no experts by default
    heads = _alike(part.query_key_value)
    if len(heads) > 2:
        raise UnrecognizedModule("its query, key and value are of three formats")
    return DecoderLayer(
        qkv=_packed(heads[0], packing.qkv),
        qkv_rest=_packed(heads[1], packing.qkv) if len(heads) > 1 else None,
        attention_out=pack([part.attention_out]),
        gate_up=pack(part.mlp.gate_up, paired=True),
        down=_packed([part.mlp.down], packing.down),
        scale=spec.scale,
        attention_norm=vector(part.attention_norm),
        attention_out_norm=vector(part.attention_out_norm),
        mlp_norm=vector(part.mlp_norm),
        mlp_out_norm=vector(part.mlp_out_norm),
        qkv_bias=_bias(part.query_key_value),
        attention_out_bias=_bias([part.attention_out]),
        gate_up_bias=_bias(part.mlp.gate_up),
        down_bias=_bias([part.mlp.down]),
        query_norm=vector(part.query_norm),
        key_norm=vector(part.key_norm),
        sinks=_float(spec.sinks),
        window=spec.window,
        softcap=spec.softcap,
        rotary=rotary,
    )


def _alike(linears: list[Linear]) -> list[list[Linear]]:
    """The layers in their order, those beside each other that can lie in one matrix together."""
    runs: list[list[Linear]] = []
    for linear in linears:
        if runs and _like(runs[-1][0], linear):
            runs[-1].append(linear)
        else:
            runs.append([linear])
    return runs


def _like(one: Linear, other: Linear) -> bool:
    if isinstance(one, CodedLinear) and isinstance(other, CodedLinear):
        return one.matrix.like(other.matrix)
    return not isinstance(one, CodedLinear) and not isinstance(other, CodedLinear)


def _packed(linears: list[Linear], pack: Pack, *, paired: bool = False) -> Matrix:
    """The layers' weights in one matrix.

    Raises:
        UnrecognizedModule: They are stored in several ways.
    """
    plain = [linear.weight for linear in linears if not isinstance(linear, CodedLinear)]
    if len(plain) == len(linears):
        return packed(pack, plain, paired=paired)
    coded = [linear for linear in linears if isinstance(linear, CodedLinear)]
    matrix = None if plain else merged(coded, paired=paired)
    if matrix is None:
        raise UnrecognizedModule("its projections are of several formats")
    return matrix


def _bias(linears: list[Linear]) -> torch.Tensor | None:
    """The merged bias; zeros where only some have one."""
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float()
        for linear in linears
    ]
    return torch.cat(biases).contiguous()


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()

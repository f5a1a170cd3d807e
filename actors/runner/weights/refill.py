"""Puts a version into a loaded model: the pack functions of a load, one module at a time.

Each matrix is replaced as soon as its successor is packed, so that no more than one layer is in
memory twice. Attention settings, places of layers and factors do not depend on weights, and stay;
the factor on embeddings is read anew. What results has the bytes of a fresh load.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest, UnsupportedModel
from rayfin.actors.processes.host_memory import free_bytes
from rayfin.actors.runner.cpu.build_decoder import pack_head, pack_layer, packing
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.cpu.packed_layers import PackedLinear, pack_module
from rayfin.actors.runner.cpu.packed_parts import (
    PackedMLP,
    PackedNorm,
    PackedWeight,
    packed_norm,
)
from rayfin.actors.runner.loading import LoadedModel
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.inspect_decoder import AttentionSpec, fed_scale
from rayfin.actors.runner.models.inspect_layers import inspect_layer, is_experts, norm_weight
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.parallel.shard_model import (
    ElsewhereLayer,
    GatheredHead,
    NoEmbedding,
    RowParallel,
    SharedNorm,
    Summed,
)
from rayfin.actors.runner.quantized.config import source_config
from rayfin.actors.runner.quantized.linear import inside_head
from rayfin.actors.runner.weights.check import check_drafts, check_finite, check_names, headers_of
from rayfin.actors.runner.weights.skeleton import Skeleton
from rayfin.actors.settings.choices import Quantization
from rayfin.actors.weights.drafts import PREFIX
from rayfin.actors.weights.sources import base_files
from rayfin.actors.weights.version import Vote, WeightVersion
from rayfin.kernels.cpu.decoder import DecoderLayer
from rayfin.kernels.cpu.kernels import CpuKernels, Matrix

PACKED: dict[type[nn.Module], tuple[str, ...]] = {
    PackedLinear: ("_weight", "_bias"),
    PackedMLP: ("gate_up", "down", "first_bias", "last_bias"),
    PackedNorm: ("factor",),
}
"""Packed modules, by whose attributes they hold their weights."""

SHARED = (Summed, RowParallel, SharedNorm, GatheredHead, NoEmbedding, ElsewhereLayer)
OURS = "rayfin."

Tensors = Mapping[str, Mapping[str, Any]]
"""What headers of files say of each tensor."""


class Refiller:
    """Changes the weights of a loaded model.

    Args:
        loaded: the model, which computes nothing while it is refilled.
    """

    def __init__(self, loaded: LoadedModel, args: EngineArgs) -> None:
        self._loaded, self._args = loaded, args
        self._made: tuple[WeightVersion, Skeleton] | None = None  # for the version that was checked

    def check(self, version: WeightVersion) -> Vote:
        """Compares a version with the model, beside its steps.

        Raises:
            InvalidRequest: it does not fit; the message names the tensor.
        """
        loaded, args = self._loaded, self._args
        config, files = load_config(args), version.files
        given, base = headers_of(files), headers_of(base_files(args))
        drafts = {name: given.pop(name) for name in sorted(given) if name.startswith(PREFIX)}
        kept = check_drafts(drafts, args)
        in_place = can_refill(loaded, args)
        plain = not base or all(name in given for name in base)
        if in_place or source_config(config) is None and not plain:
            skeleton = Skeleton(args, config, version.label, files)
            wanted = [
                (name, skeleton.checkpoint.stored(skeleton.source(name)), shape)
                for name, shape in skeleton.wanted
            ]
            _check_ties(skeleton, given)
            known = base | {name: {} for name in skeleton.ties if name in given}
            left = check_names(iter(wanted), given, known)
            self._made = (version, self._skeleton(version) if loaded.peers else skeleton)
        else:  # as the model's own files
            expected = ((name, name, entry["shape"]) for name, entry in base.items())
            left = check_names(expected, given, base)
        if args.speculation is not None and args.speculation.method == "mtp":
            self._check_head(given, base)
        check_finite(files)
        if in_place and isinstance(loaded.decoder, CpuDecoder) and not args.quantization:
            self._check_memory(given, files)
        return Vote(in_place, [*left, *kept])

    def _check_memory(self, given: Tensors, files: Sequence[Path]) -> None:
        """Numbers of 32 bits that 16 do not hold make a matrix twice as large."""
        decoder, kernels = self._loaded.decoder, self._loaded.kernels
        assert isinstance(decoder, CpuDecoder) and kernels is not None
        wide = {
            name: math.prod(entry["shape"])
            for name, entry in given.items()
            if entry["dtype"] == "F32" and len(entry["shape"]) == 2
        }
        free = free_bytes()
        if not free or 2 * sum(wide.values()) < free:  # 0: the system does not say
            return
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in wide.keys() & set(file.keys()):
                    if kernels.fits_bfloat16(file.get_tensor(name)):
                        del wide[name]
        grown = 2 * (sum(wide.values()) - decoder.packed.wide_numbers)
        if grown > free:
            raise InvalidRequest(
                f"weights of 32 bits take {grown >> 20} MiB more than those before, and "
                f"{free >> 20} MiB are free: dtype=bfloat16 rounds them",
                "dtype",
            )

    def _check_head(self, given: Tensors, base: Tensors) -> None:
        """The head that drafts comes whole, or stays whole."""
        from rayfin.actors.runner.speculation.mtp import head_names

        config: Any = self._loaded.config
        layers = config.get_text_config(decoder=True).num_hidden_layers
        known, sent = head_names(base, layers), head_names(given, layers)
        for name in sorted(known) if sent else []:
            if name not in sent or given[name]["shape"] != base[name]["shape"]:
                raise InvalidRequest(
                    f"weights have tensors of the head that drafts, and not {name}, or another "
                    "shape of it: give all of them, or none",
                    name,
                )

    def refill(self, version: WeightVersion) -> None:
        """Puts a version into the model.

        A model that this leaves by an exception has weights of two versions.

        Raises:
            UnsupportedModel: the model cannot be refilled.
            InvalidConfig: a tensor is missing.
        """
        loaded, args = self._loaded, self._args
        if not can_refill(loaded, args):
            raise UnsupportedModel("the weights of this model cannot be replaced where they are")
        prepared, self._made = self._made, None
        known = prepared is not None and (prepared[0].digest, prepared[0].place) == (
            version.digest,
            version.place,
        )
        skeleton = prepared[1] if prepared is not None and known else self._skeleton(version)
        rounded = args.quantization
        with torch.inference_mode():
            if isinstance(loaded.decoder, CpuDecoder):
                assert loaded.kernels is not None
                _refill_decoder(loaded.decoder, skeleton, rounded, loaded.kernels)
            else:
                assert isinstance(loaded.decoder, PagedModel)
                _refill_modules(loaded.decoder, skeleton, loaded, rounded)

    def _skeleton(self, version: WeightVersion) -> Skeleton:
        config, peers = load_config(self._args), self._loaded.peers
        return Skeleton(self._args, config, version.label, version.files, peers)


def _check_ties(skeleton: Skeleton, given: Any) -> None:
    for name, other in skeleton.ties.items():
        if name in given and other in given:
            read, shape = skeleton.checkpoint.read, torch.Size(given[name]["shape"])
            if given[other]["shape"] != given[name]["shape"] or not torch.equal(
                read(name, shape, None), read(other, shape, None)
            ):
                raise InvalidRequest(f"weights: {name} is tied to {other}, and differs", name)


def can_refill(loaded: LoadedModel, args: EngineArgs) -> bool:
    """Whether all weights of the model can be replaced where they are."""
    model = loaded.decoder
    if loaded.device.type != "cpu" or loaded.chooses_keys or args.quantization == "dequantize":
        return False
    if not all(part.follows_weights for part in loaded.parts):
        return False
    if isinstance(model, CpuDecoder):
        layers = model.packed.layers
        return all(layer.sinks is None and layer.qkv_rest is None for layer in layers)
    if not isinstance(model, PagedModel) or model.recurrent is not None:
        return False
    return all(_is_plain(module) for module in model.transformer.modules())


def _is_plain(module: nn.Module) -> bool:
    if type(module) in PACKED or isinstance(module, (*SHARED, PackedNorm)):
        return True
    return not (type(module).__module__.startswith(OURS) or is_experts(module))


def _refill_decoder(
    decoder: CpuDecoder, skeleton: Skeleton, rounded: Quantization | None, kernels: CpuKernels
) -> None:
    packed, model = decoder.packed, skeleton.model
    base: Any = model.base_model
    embedding, lm_head = "model.embed_tokens", "lm_head"
    for index, old in enumerate(packed.layers):
        path = f"model.layers.{index}"
        with skeleton.filled(path):
            part = inspect_layer(model.get_submodule(path))
            spec = _spec_of(old, decoder)
            packs = packing(kernels, rounded, old.matrices)
            packed.replace_layer(index, pack_layer(kernels, part, spec, old.rotary, packs))
        del part
    spares = list({id(end): end for end in (packed.embedding, packed.head)}.values())
    with skeleton.filled(lm_head):
        layer: Any = model.get_submodule(lm_head)
        head = pack_head(layer, packing(kernels, rounded, spares))
        bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
    tied = skeleton.is_tied(f"{embedding}.weight", f"{lm_head}.weight")
    table = head
    if not tied:
        with skeleton.filled(embedding):
            table = kernels.pack([base.embed_tokens.weight], spares=spares)
    with skeleton.filled("model.norm"):
        norm = norm_weight(base.norm)
    assert norm is not None
    scale = packed.shape.embedding_scale
    if scale != 1.0:
        scale = _scale_of(skeleton, base)
    packed.replace_ends(
        embedding=table, head=head, final_norm=norm[0], head_bias=bias, embedding_scale=scale
    )


def _spec_of(layer: DecoderLayer, decoder: CpuDecoder) -> AttentionSpec:
    shape = decoder.packed.shape
    sizes = (shape.heads, shape.key_dim, shape.kv_heads, shape.value_dim)
    return AttentionSpec(*sizes, layer.scale, layer.window, layer.softcap, None)


def _scale_of(skeleton: Skeleton, base: Any) -> float:
    """The factor on embeddings, by the first rows of the table."""
    module, name = base.embed_tokens, "model.embed_tokens.weight"
    empty = module._parameters["weight"]
    with skeleton.checkpoint.opened():
        rows = skeleton.read(name)[:4].to(empty.dtype)
    module._parameters["weight"] = nn.Parameter(rows, requires_grad=False)
    try:
        device = torch.device("cpu")
        return fed_scale(skeleton.model, base.layers[0], module, device, alone=True)
    finally:
        module._parameters["weight"] = empty


def _refill_modules(
    paged: PagedModel, skeleton: Skeleton, loaded: LoadedModel, rounded: Quantization | None
) -> None:
    model, structure = paged.transformer, skeleton.model
    head = inside_head(structure) if rounded else set()
    for path, module in list(model.named_modules()):
        fields = next((names for kind, names in PACKED.items() if isinstance(module, kind)), None)
        if fields is None:
            with skeleton.checkpoint.opened():
                for leaf, parameter in module._parameters.items():
                    if parameter is not None:
                        tensor = skeleton.read(f"{path}.{leaf}" if path else leaf)
                        module._parameters[leaf] = _renewed(parameter, tensor, loaded)
            continue
        assert loaded.kernels is not None
        with skeleton.filled(path):
            source: Any = structure.get_submodule(path)
            if isinstance(module, PackedNorm):
                packed: nn.Module | None = packed_norm(source, loaded.kernels)
            else:
                activation = getattr(module, "activation", None)
                held = [getattr(module, name) for name in fields]
                spares = [matrix for matrix in held if isinstance(matrix, Matrix)]
                packs = packing(loaded.kernels, rounded, spares).of(path.rpartition(".")[2])
                packed = pack_module(loaded.kernels, activation, {}, source, packs, source in head)
            for name in fields:
                setattr(module, name, getattr(packed, name))
    for name in skeleton.buffers:
        model.get_buffer(name).copy_(skeleton.read(name))


def _renewed(parameter: Any, tensor: torch.Tensor, loaded: LoadedModel) -> Any:
    """A parameter that modules use as it is, with the numbers of ``tensor``."""
    if isinstance(parameter, PackedWeight):
        assert loaded.kernels is not None
        weight = tensor.to(parameter.dtype).contiguous()
        matrix = loaded.kernels.pack([weight], spares=[parameter.matrix])
        return PackedWeight(weight, loaded.kernels, matrix)
    parameter.copy_(tensor)
    return parameter

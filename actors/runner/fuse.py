"""Fusing after load: a recognised decoder becomes one call of the compiled kernels per step.

The transformers model stays the authority. Its structure says which weights there are, a probe
through it says how each layer attends and how the embedding is scaled, and in the end both compute
the same prompt: if their logits differ, the fused one is dropped and the model runs as it is.
A model that is to be quantised is held to that with its exact weights first.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfin.actors.config import Quantization
from rayfin.actors.runner.fuse_layers import LayerParts, NotRecognised, norm_weight, read_layer
from rayfin.actors.runner.fused_model import FusedModel, rotary_tables
from rayfin.actors.runner.paged_model import LAYER, PagedModel
from rayfin.actors.runner.weights import max_position
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.attention.interface import PagedBatch
from rayfin.kernels.cpu.decoder import DecoderLayer, DecoderShape, PackedDecoder
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Matrix

logger = logging.getLogger(__name__)

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU,
}
CHECKED_TOKENS = 24
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""How far logits may be apart, as a share of the largest one."""


WEIGHTS: dict[Quantization | None, torch.dtype | None] = {None: None, "int8": torch.int8}
"""How weights are stored; None is as exactly as they came."""


def fuse(
    paged: PagedModel, kernels: CpuKernels, quantization: Quantization | None = None
) -> FusedModel | None:
    """The model on compiled kernels with the same results, or None if it is not recognised.

    With ``quantization``, results are what rounding makes of them.
    """
    name = type(paged.transformer).__name__
    try:
        fused = _build(paged, kernels, None)
    except NotRecognised as reason:
        logger.info("%s is not fused: %s", name, reason)
        return None
    difference = _difference(paged, fused)
    if difference > TOLERANCE[paged.dtype]:
        logger.warning("%s is not fused: logits would differ by %.1e", name, difference)
        return None
    if quantization:
        del fused  # its memory is needed
        return _build(paged, kernels, WEIGHTS[quantization])
    return fused


@dataclass(frozen=True, slots=True)
class _Attending:
    """How one layer's attention was called."""

    heads: int
    key_dim: int
    kv_heads: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class _Observer:
    """Sits on every attention module for one forward, and writes down how it is called."""

    def __init__(self) -> None:
        self.seen: dict[nn.Module, _Attending] = {}

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.seen[module] = _Attending(
            query.shape[1],
            query.shape[3],
            key.shape[1],
            value.shape[3],
            scale,
            window,
            softcap,
            sinks,
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@torch.inference_mode()
def _build(paged: PagedModel, kernels: CpuKernels, storage: torch.dtype | None) -> FusedModel:
    model: Any = paged.transformer
    config = model.config.get_text_config(decoder=True)
    decoder, layers, embedding = _backbone(model)
    parts = [read_layer(layer) for layer in layers]
    observed, embedding_scale = _observe(paged, layers[0], embedding)
    attending = [observed[part.attention] for part in parts]
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
    if activation not in ACTIVATIONS:
        raise NotRecognised(f"activation {activation!r}")
    kinds, rotate = rotary_tables(decoder.rotary_emb, config, max_position(model.config))
    final_norm = norm_weight(decoder.norm)
    assert final_norm is not None
    first = attending[0]
    shape = DecoderShape(
        hidden=embedding.weight.shape[1],
        intermediate=parts[0].down.in_features,
        vocabulary=model.lm_head.out_features,
        heads=first.heads,
        kv_heads=first.kv_heads,
        key_dim=first.key_dim,
        value_dim=first.value_dim,
        rotary_dim=2 * rotate(1)[0][0].shape[1],
        eps=final_norm[1],
        activation=ACTIVATIONS[activation],
        whole_norm=_has_whole_norm(parts[0], first),
        embedding_scale=embedding_scale,
        residual_scale=float(getattr(layers[0], "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", None) or 1.0),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )
    _require_alike(parts, attending, shape)
    packed = [
        _pack_layer(kernels, part, how, kinds[index], storage)
        for index, (part, how) in enumerate(zip(parts, attending, strict=True))
    ]
    head = kernels.pack([model.lm_head.weight], storage=storage)
    tied = model.lm_head.weight.data_ptr() == embedding.weight.data_ptr()
    return FusedModel(
        PackedDecoder(
            kernels,
            shape,
            packed,
            embedding=head if tied else kernels.pack([embedding.weight]),
            head=head,
            final_norm=final_norm[0],
            head_bias=_float(model.lm_head.bias),
        ),
        rotate,
        paged.layouts,
        paged.dtype,
    )


def _backbone(model: Any) -> tuple[Any, list[nn.Module], nn.Embedding]:
    """The decoder, its layers and its token embedding."""
    decoder = getattr(model, "model", None)
    expected = {"embed_tokens", "layers", "norm", "rotary_emb"}
    children = {name for name, _ in decoder.named_children()} if decoder is not None else set()
    if children != expected or {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        raise NotRecognised(f"its parts are {', '.join(sorted(children)) or 'others'}")
    assert decoder is not None
    if type(model.lm_head) is not nn.Linear or not isinstance(decoder.embed_tokens, nn.Embedding):
        raise NotRecognised(f"its head is a {type(model.lm_head).__name__}")
    return decoder, list(decoder.layers), decoder.embed_tokens


def _observe(
    paged: PagedModel, first_layer: nn.Module, embedding: nn.Embedding
) -> tuple[dict[nn.Module, _Attending], float]:
    """How each attention module is called, and what embeddings are multiplied by."""
    model, observer = paged.transformer, _Observer()
    tokens = torch.arange(1, 4).remainder(embedding.num_embeddings).unsqueeze(0)
    inputs: list[torch.Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    hook = first_layer.register_forward_pre_hook(keep, with_kwargs=True)
    for module in paged.attention_modules:
        setattr(module, LAYER, observer)
    try:
        model(input_ids=tokens, position_ids=torch.arange(3).unsqueeze(0), use_cache=False)
    finally:
        hook.remove()
        for module in paged.attention_modules:
            delattr(module, LAYER)
    rows, seen = embedding.weight[tokens[0]].float(), inputs[0][0].float()
    scale = float((seen * rows).sum() / rows.square().sum())
    if not torch.allclose(seen, rows * scale, rtol=1e-2, atol=1e-4):
        raise NotRecognised("its layers are not fed by token embeddings alone")
    return observer.seen, 1.0 if abs(scale - 1.0) < 1e-6 else scale


def _has_whole_norm(part: LayerParts, how: _Attending) -> bool:
    """Whether the query norm runs over all heads at once (OLMo 2) and not over each (Qwen 3)."""
    query_norm = norm_weight(part.query_norm)
    return query_norm is not None and len(query_norm[0]) != how.key_dim


def _require_alike(
    parts: list[LayerParts], attending: list[_Attending], shape: DecoderShape
) -> None:
    shared = (shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim, shape.intermediate)
    for part, how in zip(parts, attending, strict=True):
        sizes = (how.heads, how.kv_heads, how.key_dim, how.value_dim, part.down.in_features)
        if sizes != shared:
            raise NotRecognised("its layers are of several sizes")
        norms = (part.attention_norm, part.attention_out_norm, part.mlp_norm, part.mlp_out_norm)
        for norm in (*norms, part.query_norm, part.key_norm):
            weight = norm_weight(norm)
            if weight is not None and weight[1] != shape.eps:
                raise NotRecognised("its norms have several epsilons")


def _pack_layer(
    kernels: CpuKernels,
    part: LayerParts,
    how: _Attending,
    rotary: int,
    storage: torch.dtype | None,
) -> DecoderLayer:
    def vector(norm: nn.Module | None) -> torch.Tensor | None:
        weight = norm_weight(norm)
        return None if weight is None else weight[0]

    def pack(linears: list[nn.Linear], paired: bool = False) -> Matrix:
        weights = [linear.weight for linear in linears]
        return kernels.pack(weights, paired=paired, storage=storage)

    return DecoderLayer(
        qkv=pack(part.query_key_value),
        attention_out=pack([part.attention_out]),
        gate_up=pack(part.gate_up, paired=True),
        down=pack([part.down]),
        scale=how.scale,
        attention_norm=vector(part.attention_norm),
        attention_out_norm=vector(part.attention_out_norm),
        mlp_norm=vector(part.mlp_norm),
        mlp_out_norm=vector(part.mlp_out_norm),
        qkv_bias=_bias(part.query_key_value),
        attention_out_bias=_bias([part.attention_out]),
        gate_up_bias=_bias(part.gate_up),
        down_bias=_bias([part.down]),
        query_norm=vector(part.query_norm),
        key_norm=vector(part.key_norm),
        sinks=_float(how.sinks),
        window=how.window,
        softcap=how.softcap,
        rotary=rotary,
    )


def _bias(linears: list[nn.Linear]) -> torch.Tensor | None:
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


def _difference(paged: PagedModel, fused: FusedModel) -> float:
    """How far apart both models' logits are on one prompt, as a share of the largest."""
    logits = [probe_logits(model, paged) for model in (paged, fused)]
    scale = logits[0].abs().max().clamp(min=1e-6)
    difference = ((logits[0] - logits[1]).abs().max() / scale).item()
    return difference if difference == difference else float("inf")


def probe_logits(model: PagedModel | FusedModel, paged: PagedModel) -> torch.Tensor:
    """The logits of all tokens of a chunk after half a prompt, on pages of its own."""
    page_size, half = 8, CHECKED_TOKENS // 2
    pages = CHECKED_TOKENS // page_size
    cache = KVTensors(paged.layouts, pages, page_size, paged.dtype, torch.device("cpu"))
    model.bind(cache)
    vocabulary = paged.transformer.config.get_text_config(decoder=True).vocab_size
    tokens = (torch.arange(CHECKED_TOKENS) * 7919 + 11) % vocabulary
    logits = []
    for start in (0, half):
        positions = torch.arange(start, start + half)
        starts, lengths = np.array([0, half], np.int32), np.array([start + half], np.int32)
        batch = PagedBatch(
            query_start=torch.from_numpy(starts),
            kv_len=torch.from_numpy(lengths),
            page_tables=torch.arange(pages, dtype=torch.int32).unsqueeze(0),
            slots=positions,
            positions=positions,
            query_start_cpu=starts,
            kv_len_cpu=lengths,
            decoding=0,
            page_size=page_size,
        )
        logits.append(model.forward(tokens[start : start + half], batch, torch.arange(half)))
    model.bind(KVTensors(paged.layouts, 0, page_size, paged.dtype, torch.device("cpu")))
    return torch.cat(logits).float()

"""Reads a whole decoder: weights by structure, attention settings by watching a forward."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.models.config import max_position
from rayfin.actors.runner.models.inspect_layers import (
    Bare,
    GatedParts,
    LayerParts,
    Linear,
    inspect_layer,
    is_linear,
    itself,
    norm_weight,
)
from rayfin.actors.runner.models.paged_model import LAYER, PagedModel
from rayfin.actors.runner.models.step_model import Tables
from rayfin.actors.runner.quantized.linear import SmallEmbedding
from rayfin.kernels.cpu.decoder import DecoderShape
from rayfin.kernels.cpu.kernels import Activation

Embedding = nn.Embedding | SmallEmbedding

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU,
}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The sizes and settings of one layer's attention."""

    heads: int
    key_dim: int
    kv_heads: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class _Observer:
    """Records the attention settings of every layer during one forward."""

    def __init__(self) -> None:
        self.seen: dict[nn.Module, AttentionSpec] = {}

    def positions(self, query: torch.Tensor) -> torch.Tensor:
        """Positions from 0 on."""
        return torch.arange(query.shape[2], device=query.device)

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
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        self.seen[module] = AttentionSpec(
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


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """All parts of a recognized decoder."""

    shape: DecoderShape
    layers: list[LayerParts]
    attending: list[AttentionSpec]  # of each layer
    rotary: list[int]  # index of the rotary tables, for each layer
    rotate: Callable[[int], Tables]  # number of positions -> tables
    rotate_at: Callable[[torch.Tensor], Tables]  # positions [3, T] -> rows of such tables
    embedding: Embedding
    head: Linear
    final_norm: torch.Tensor  # [hidden] fp32


@torch.inference_mode()
def inspect_decoder(
    paged: PagedModel, experts: type[nn.Module] | None = None, bare: Bare = itself
) -> DecoderSpec:
    """The parts of the model. MLPs may be mixtures whose experts are of the type ``experts``.

    Of a rank's share these are its ``bare`` layers, whose outputs are still to be summed behind
    attention and MLP, and gathered behind the head. A mixture sums its own.

    Raises:
        UnrecognizedModule: The model has other parts, or uses them in another way.
    """
    model: Any = paged.transformer
    if paged.is_limited_by_mask:
        raise UnrecognizedModule("its mask limits what layers see")
    config = model.config.get_text_config(decoder=True)
    decoder, layers, embedding = _backbone(model, bare)
    if model.lm_head.out_features < config.vocab_size:
        raise UnrecognizedModule("its head has fewer rows than there are tokens")
    parts = [inspect_layer(layer, experts, bare) for layer in layers]
    observed, embedding_scale = _observe(paged, layers[0], embedding)
    attending = [observed[part.attention] for part in parts]
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
    if activation not in ACTIVATIONS:
        raise UnrecognizedModule(f"activation {activation!r}")
    kinds, rotate, rotate_at = rotary_tables(decoder.rotary_emb, config, max_position(model.config))
    final_norm = norm_weight(decoder.norm)
    assert final_norm is not None
    first, rotary_dim = attending[0], 2 * rotate(1)[0][0].shape[1]
    if rotary_dim > first.key_dim:
        raise UnrecognizedModule("its rotary embedding turns other pairs")
    shape = DecoderShape(
        hidden=embedding.weight.shape[1],
        intermediate=_intermediate(parts),
        vocabulary=model.lm_head.out_features,
        heads=first.heads,
        kv_heads=first.kv_heads,
        key_dim=first.key_dim,
        value_dim=first.value_dim,
        rotary_dim=rotary_dim,
        eps=final_norm[1],
        activation=ACTIVATIONS[activation],
        whole_norm=_has_whole_norm(parts[0], first),
        embedding_scale=embedding_scale,
        residual_scale=float(getattr(layers[0], "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", None) or 1.0),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )
    _require_alike(parts, attending, shape)
    head = bare(model.lm_head)
    return DecoderSpec(
        shape, parts, attending, kinds, rotate, rotate_at, embedding, head, final_norm[0]
    )


def _backbone(model: Any, bare: Bare) -> tuple[Any, list[nn.Module], Embedding]:
    """The decoder, its layers and its token embedding."""
    decoder = getattr(model, "model", None)
    expected = {"embed_tokens", "layers", "norm", "rotary_emb"}
    children = {name for name, _ in decoder.named_children()} if decoder is not None else set()
    if children != expected or {name for name, _ in model.named_children()} != {"model", "lm_head"}:
        raise UnrecognizedModule(f"its parts are {', '.join(sorted(children)) or 'others'}")
    assert decoder is not None
    if not is_linear(bare(model.lm_head)) or not isinstance(decoder.embed_tokens, Embedding):
        raise UnrecognizedModule(f"its head is a {type(model.lm_head).__name__}")
    return decoder, list(decoder.layers), decoder.embed_tokens


def _observe(
    paged: PagedModel, first_layer: nn.Module, embedding: Embedding
) -> tuple[dict[nn.Module, AttentionSpec], float]:
    """The settings of each attention module, and the factor on embeddings."""
    observer = _Observer()
    for module in paged.attention_modules:
        setattr(module, LAYER, observer)
    try:
        scale = fed_scale(paged.transformer, first_layer, embedding, paged.device)
    finally:
        for module in paged.attention_modules:
            delattr(module, LAYER)
    return observer.seen, scale


def fed_scale(
    model: nn.Module,
    first_layer: nn.Module,
    embedding: Embedding,
    device: torch.device,
    *,
    alone: bool = False,
) -> float:
    """The factor on embeddings in front of the first layer.

    Args:
        alone: only the embedding has weights, so no layer runs.

    Raises:
        UnrecognizedModule: its layers are fed by something else.
    """
    tokens = torch.arange(1, 4, device=device).remainder(embedding.num_embeddings).unsqueeze(0)
    inputs: list[torch.Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        if alone:
            raise UnrecognizedModule("its layers have no weights")

    hook = first_layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        positions = torch.arange(3, device=device).unsqueeze(0)
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    except UnrecognizedModule:
        if not inputs:
            raise
    finally:
        hook.remove()
    if isinstance(embedding, SmallEmbedding):
        rows = embedding.rows(tokens[0]).float()
    else:
        rows = embedding.weight[tokens[0]].float()
    seen = inputs[0][0].float()
    scale = float((seen * rows).sum() / rows.square().sum())
    if not torch.allclose(seen, rows * scale, rtol=1e-2, atol=1e-4):
        raise UnrecognizedModule("its layers are not fed by token embeddings alone")
    return 1.0 if abs(scale - 1.0) < 1e-6 else scale


def _has_whole_norm(part: LayerParts, spec: AttentionSpec) -> bool:
    """Whether the query norm covers all heads at once (OLMo 2) or each head (Qwen 3)."""
    query_norm = norm_weight(part.query_norm)
    return query_norm is not None and len(query_norm[0]) != spec.key_dim


def _intermediate(parts: list[LayerParts]) -> int:
    """The width of gated MLPs, 0 where all layers are mixtures."""
    widths = [part.mlp.down.in_features for part in parts if isinstance(part.mlp, GatedParts)]
    return widths[0] if widths else 0


def _require_alike(
    parts: list[LayerParts], attending: list[AttentionSpec], shape: DecoderShape
) -> None:
    shared = (shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim)
    for part, spec in zip(parts, attending, strict=True):
        sizes = (
            spec.heads,
            spec.kv_heads,
            spec.key_dim,
            spec.value_dim,
        )
        width = part.mlp.down.in_features if isinstance(part.mlp, GatedParts) else None
        if sizes != shared or width not in (None, shape.intermediate):
            raise UnrecognizedModule("its layers are of several sizes")
        norms = (part.attention_norm, part.attention_out_norm, part.mlp_norm, part.mlp_out_norm)
        for norm in (*norms, part.query_norm, part.key_norm):
            weight = norm_weight(norm)
            if weight is not None and weight[1] != shape.eps:
                raise UnrecognizedModule("its norms have several epsilons")


def rotary_tables(
    rotary: nn.Module, config: Any, limit: int | None
) -> tuple[list[int], Callable[[int], Tables], Callable[[torch.Tensor], Tables]]:
    """The index of each layer's table, and functions from positions to the tables.

    One takes a number of positions, the other positions [3, T] of images in time, height and width.
    The cosines and sines come from the model's rotary module, including its scaling. They are never
    computed for more than ``limit`` positions, since some modules change with the longest position.
    """
    layers = config.num_hidden_layers
    by_type = "layer_type" in inspect.signature(rotary.forward).parameters
    types: list[str | None] = list(config.layer_types) if by_type else [None] * layers
    distinct = sorted(set(types), key=str)

    def rotate(count: int) -> Tables:
        return rows(torch.arange(count if limit is None else min(count, limit)).unsqueeze(0))

    def rotate_at(positions: torch.Tensor) -> Tables:
        return rows(positions.unsqueeze(1))

    def turned(kind: str | None, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0)
        arguments = (like, positions) if kind is None else (like, positions, kind)
        cos, sin = rotary(*arguments)  # [1, positions, rotary_dim], or one half of it (gpt-oss)
        return cos[0], sin[0]

    def half(kind: str | None) -> int:
        cos, _ = turned(kind, torch.tensor([[1]]))
        first, second = cos.tensor_split(2, dim=-1)
        return first.shape[-1] if torch.equal(first, second) else cos.shape[-1]

    halves = {kind: half(kind) for kind in distinct}

    def rows(positions: torch.Tensor) -> Tables:
        tables = []
        for kind in distinct:
            cos, sin = (of[:, : halves[kind]].clone() for of in turned(kind, positions))
            tables.append((cos, sin))
        return tables

    return [distinct.index(kind) for kind in types], rotate, rotate_at

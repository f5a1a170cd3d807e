"""Loads a model that pools: its base model, and what stands behind the pooling."""

from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.pooling.recipe import PoolingRecipe
from rayfin.actors.runner.models.mapped_weights import widen
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.parts.model_part import ModelPart
from rayfin.actors.runner.parts.pooling.encoder_model import ATTENTION, EncoderModel
from rayfin.actors.runner.parts.pooling.headless import HeadlessDecoder
from rayfin.actors.runner.parts.pooling.heads import (
    ClassifierHead,
    LinearHead,
    VectorHead,
    load_dense,
)
from rayfin.actors.runner.parts.pooling.pooler import Head, Pooler


class PoolingPart(ModelPart):
    """How a loaded model pools."""

    samples = False

    def __init__(self, recipe: PoolingRecipe, head: Head) -> None:
        self.recipe, self._head = recipe, head
        self.max_tokens = recipe.max_tokens

    def make_sampler(self, rows: int) -> Pooler:
        return Pooler(self.recipe, self._head, rows)


def load_decoder(
    args: EngineArgs,
    config: PretrainedConfig,
    recipe: PoolingRecipe,
    device: torch.device,
    attention: str,
) -> tuple[Any, Head]:
    """A causal model whose "logits" are its last hidden states, and its head.

    Raises:
        InvalidConfig, UnsupportedModel: as ``load_model``; or a token of a label is unknown.
    """
    if recipe.label_tokens:
        model: Any = load_model(args, config, device, attention, AutoModelForCausalLM, narrow=True)
        head: Head = LinearHead(_label_rows(args, recipe, model.lm_head.weight))
        return HeadlessDecoder(model.model), head
    if recipe.kind == "classify":
        kind = AutoModelForSequenceClassification
        model = load_model(args, config, device, attention, kind, narrow=True)
        return HeadlessDecoder(model.base_model), LinearHead(model.score.weight, model.score.bias)
    base = load_model(args, config, device, attention, AutoModel, narrow=True)
    return HeadlessDecoder(base), vector_head(args, recipe, device)


def load_encoder(
    args: EngineArgs, config: PretrainedConfig, recipe: PoolingRecipe, device: torch.device
) -> tuple[EncoderModel, Head]:
    """An encoder, whose weights the caller packs or widens, and its head.

    Raises:
        InvalidConfig, UnsupportedModel: as ``load_model`` and ``EncoderModel``.
    """
    if recipe.kind == "classify":
        kind = AutoModelForSequenceClassification
        model: Any = load_model(args, config, device, ATTENTION, kind, narrow=True)
        base = model.base_model
        widen(model, but=base)
        return EncoderModel(base), ClassifierHead(model, base)
    base = load_model(args, config, device, ATTENTION, AutoModel, narrow=True)
    return EncoderModel(base), vector_head(args, recipe, device)


def vector_head(args: EngineArgs, recipe: PoolingRecipe, device: torch.device) -> VectorHead:
    """Dense layers and normalization of an embedding model."""
    return VectorHead(recipe, [load_dense(args, layer, device) for layer in recipe.dense])


def _label_rows(args: EngineArgs, recipe: PoolingRecipe, head: torch.Tensor) -> torch.Tensor:
    """[labels, H]: the head's rows of the label tokens; of two ways, their difference."""
    tokenizer: Any = AutoTokenizer.from_pretrained(
        args.tokenizer or args.model,
        trust_remote_code=args.trust_remote_code,
        **args.tokenizer_hub,
    )
    ids = [tokenizer.convert_tokens_to_ids(token) for token in recipe.label_tokens]
    for token, number in zip(recipe.label_tokens, ids, strict=True):
        if number is None or number == tokenizer.unk_token_id:
            raise InvalidConfig(f"the tokenizer has no token {token!r}", "hf_overrides")
    rows = head[ids].float()
    return rows[1:] - rows[:1] if recipe.two_way else rows

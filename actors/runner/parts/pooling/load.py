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
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.runner.cpu.build_decoder import TOLERANCE
from rayfin.actors.runner.cpu.packed_layers import pack_linears
from rayfin.actors.runner.loading import LoadedModel, cpu_kernels
from rayfin.actors.runner.models.mapped_weights import widen
from rayfin.actors.runner.models.paged_model import ATTENTION as PAGED
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.parts.model_part import ModelPart, Weights
from rayfin.actors.runner.parts.pooling.encoder_model import ATTENTION, EncoderModel
from rayfin.actors.runner.parts.pooling.headless import HeadlessDecoder
from rayfin.actors.runner.parts.pooling.heads import (
    ClassifierHead,
    LinearHead,
    VectorHead,
    load_dense,
)
from rayfin.actors.runner.parts.pooling.pooler import Head, Pooler
from rayfin.kernels.cpu.kernels import CpuKernels


class PoolingPart(ModelPart):
    """How a loaded model pools."""

    samples = False

    def __init__(self, recipe: PoolingRecipe, head: Head) -> None:
        self.recipe, self._head = recipe, head
        self.max_tokens = recipe.max_tokens

    def make_sampler(self, rows: int) -> Pooler:
        return Pooler(self.recipe, self._head, rows)


def read_pooling(
    args: EngineArgs, config: PretrainedConfig, device: torch.device, recipe: PoolingRecipe | None
) -> Weights | None:
    """Reads a decoder that pools; None if the model does not pool."""
    if recipe is None:
        return None
    model, head = _read_decoder(args, config, recipe, device)
    return Weights(model, model, (PoolingPart(recipe, head),), compared=False)


def load_encoder(
    args: EngineArgs, config: PretrainedConfig, device: torch.device, recipe: PoolingRecipe | None
) -> LoadedModel | None:
    """Loads an encoder: it has no pages, and its linear layers are on compiled kernels.

    Returns:
        None if the model is none.

    Raises:
        InvalidConfig, UnsupportedModel: as ``load_model`` and ``EncoderModel``.
    """
    if recipe is None or not recipe.encoder:
        return None
    model, head = _read_encoder(args, config, recipe, device)
    kernels: CpuKernels | None = None
    if device.type == "cpu":
        kernels = cpu_kernels(args, model.transformer.num_parameters())
        if kernels and model.dtype in TOLERANCE:
            pack_linears(model, kernels)
            torch.set_num_threads(1)  # where an array is split would change bits at the seams
    widen(model.transformer)
    return LoadedModel(
        *(device, config, model, None, model.dtype, kernels, None),
        parts=(PoolingPart(recipe, head),),
        position_offset=model.position_offset,
        whole_prompts=True,
    )


def _read_decoder(
    args: EngineArgs, config: PretrainedConfig, recipe: PoolingRecipe, device: torch.device
) -> tuple[Any, Head]:
    """A causal model whose "logits" are its last hidden states, and its head.

    Raises:
        InvalidConfig, UnsupportedModel: as ``load_model``; or a token of a label is unknown.
    """
    if recipe.label_tokens:
        kind: Any = AutoModelForCausalLM
        model: Any = load_model(args, config, device, PAGED, kind, narrow=True)
        head: Head = LinearHead(_label_rows(args, recipe, model.lm_head.weight))
        return HeadlessDecoder(model.model), head
    if recipe.kind == "classify":
        kind = AutoModelForSequenceClassification
        model = load_model(args, config, device, PAGED, kind, narrow=True)
        return HeadlessDecoder(model.base_model), LinearHead(model.score.weight, model.score.bias)
    base = load_model(args, config, device, PAGED, AutoModel, narrow=True)
    return HeadlessDecoder(base), vector_head(args, recipe, device)


def _read_encoder(
    args: EngineArgs, config: PretrainedConfig, recipe: PoolingRecipe, device: torch.device
) -> tuple[EncoderModel, Head]:
    """Returns an encoder, whose weights are still to be packed or widened, and its head."""
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

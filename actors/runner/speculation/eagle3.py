"""An EAGLE-3 head: a folder of its own, in the published format.

It reads the inputs of three layers of the model and guesses in a vocabulary of its own, whose
tokens ``d2t`` leads to the model's. config.json is that of the authors (``LlamaForCausalLMEagle3``)
or of the speculators library. (Li et al., EAGLE-3, 2025.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from rayfin.actors.config import EngineArgs
from rayfin.actors.runner.loading import BASE, LoadedModel
from rayfin.actors.runner.speculation.head_folder import (
    find_head,
    read_json,
    read_tensors,
    refuse,
    require_fitting,
)
from rayfin.actors.runner.speculation.head_model import HeadModel, fill
from rayfin.actors.runner.speculation.heads import require_states, with_head
from rayfin.actors.runner.speculation.taps import embedding_of, tap_layers
from rayfin.actors.weights.tensors import draft_tensors
from rayfin.actors.weights.version import WeightVersion

UNUSED = ("t2d", "mask_hidden")
"""Weights that drafting does not need."""


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    """What config.json says."""

    config: LlamaConfig
    draft_vocabulary: int | None  # None: the model's
    layers: tuple[int, ...] | None  # of the model, whose inputs the head reads; None: the default
    norm_before_residual: bool = False
    norm_output: bool = False  # the next draft takes the normed states


class Eagle3Layer(nn.Module):
    """Attention over [embedding, state], and an MLP; the residual stream has the state alone."""

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * hidden, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self._norm_before_residual = norm_before_residual

    def forward(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[1, T, hidden] each -> [1, T, hidden]."""
        normed = self.hidden_norm(states)
        residual = normed if self._norm_before_residual else states
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        attended, _ = self.self_attn(both, position_embeddings=rotary, attention_mask=None)
        states = residual + attended
        out: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Eagle3Head(HeadModel):  # type: ignore[no-untyped-call]
    """The head; parameters have the names of the published checkpoints."""

    def __init__(
        self,
        settings: Eagle3Settings,
        embed: Callable[[torch.Tensor], torch.Tensor],
        width: int,
        d2t: torch.Tensor | None,
    ) -> None:
        config = settings.config
        super().__init__(config, embed, width)
        hidden = config.hidden_size
        self.fc = nn.Linear(width, hidden, bias=False)
        self.midlayer = Eagle3Layer(config, norm_before_residual=settings.norm_before_residual)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, settings.draft_vocabulary or config.vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._norm_output = settings.norm_output
        self._d2t = d2t  # [draft vocabulary] int64, added to an index

    def narrow(self, states: torch.Tensor) -> torch.Tensor:
        """The states [T, width] of the model as the head takes them: [T, hidden]."""
        narrowed: torch.Tensor = self.fc(states.to(self.dtype))
        return narrowed

    def tokens_of(self, index: torch.Tensor) -> torch.Tensor:
        """The model's tokens for the indices [N] in the head's logits."""
        return index if self._d2t is None else index + self._d2t[index]

    def guess(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The layer: embeddings and states [1, T, hidden] -> states [1, T, hidden]."""
        out: torch.Tensor = self.midlayer(embeds, states, self.rotary_emb(embeds, positions))
        return out

    def score(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [1, S, D] of ``guess``'s states, and the states that the next draft takes."""
        normed = self.norm(states)
        return self.lm_head(normed), normed if self._norm_output else states


def with_eagle3(
    loaded: LoadedModel, args: EngineArgs, name: str, version: WeightVersion = BASE
) -> LoadedModel:
    """The model with the EAGLE-3 head ``name``, a folder or a Hugging Face name.

    Args:
        version: of the weights, whose tensors of the head count before those of the folder.

    Raises:
        InvalidConfig: the head cannot be read, or is of another model.
    """
    require_states(loaded, args)
    folder = find_head(name, args)
    settings = read_settings(folder)
    weights = _named(read_tensors(folder) | draft_tensors(version))
    target: Any = loaded.config.get_text_config(decoder=True)
    require_fitting(folder, settings.config, target)
    count = target.num_hidden_layers
    layers = settings.layers or (2, count // 2, count - 3)
    states = tap_layers(loaded.model, layers)
    embed = embedding_of(loaded.model)
    if (embeddings := weights.pop("embed_tokens.weight", None)) is not None:
        weight = embeddings.to(loaded.device, loaded.model.dtype)
        embed = nn.Embedding.from_pretrained(weight)  # type: ignore[no-untyped-call]
    d2t = weights.pop("d2t", None)
    if d2t is None and settings.draft_vocabulary not in (None, target.vocab_size):
        refuse(folder, "lacks d2t, which leads from its vocabulary to the model's")
    settings.config._attn_implementation = "eager"  # until it is on pages
    width = len(layers) * target.hidden_size
    d2t = None if d2t is None else d2t.to(loaded.device, torch.int64)
    head: Any = Eagle3Head(settings, embed, width, d2t)
    fill(head, weights, partial(refuse, folder))
    head.to(loaded.device, loaded.model.dtype).eval().requires_grad_(False)
    return with_head(loaded, args, head, states)


def read_settings(folder: Path) -> Eagle3Settings:
    """What the folder's config.json says.

    Raises:
        InvalidConfig: it is missing, or not that of an EAGLE-3 head.
    """
    said = read_json(folder)
    library = said.get("speculators_model_type")
    if library not in (None, "eagle3"):
        refuse(folder, f"is a speculator of type {library!r}, not an EAGLE-3 head")
    if library is None and not any("Eagle3" in name for name in said.get("architectures") or ()):
        refuse(folder, f"is {said.get('architectures')}, not an EAGLE-3 head")
    inner: Mapping[str, Any] = said.get("transformer_layer_config") or said
    try:
        config = LlamaConfig.from_dict(dict(inner))
    except (TypeError, ValueError, KeyError) as error:
        refuse(folder, f"has a config.json that cannot be read: {error}")
    if inner.get("model_type", "llama") != "llama" or config.num_hidden_layers != 1:
        refuse(folder, "must be one layer of the Llama kind")
    for key in ("norm_before_fc", "fc_norm"):
        if said.get(key) or (said.get("eagle_config") or {}).get(key):
            refuse(folder, f"has {key}, which Rayfin does not know")
    layers = said.get("eagle_aux_hidden_state_layer_ids") or (said.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    return Eagle3Settings(
        config,
        said.get("draft_vocab_size"),
        None if layers is None else tuple(layers),
        norm_before_residual=bool(said.get("norm_before_residual", library is not None)),
        norm_output=bool(said.get("norm_output", False)),
    )


def _named(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    return {name: weight for name, weight in named.items() if name not in UNUSED}

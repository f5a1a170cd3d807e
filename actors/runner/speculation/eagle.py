"""An EAGLE head of the first version: a folder of its own, in the published format.

It merges the next token's embedding with what the model's last norm gives, runs one layer without
a norm before it, and uses the model's head. (Li et al., EAGLE, 2024.)
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

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
from rayfin.actors.runner.speculation.taps import embedding_of, head_of, tap_last
from rayfin.actors.weights.tensors import draft_tensors
from rayfin.actors.weights.version import WeightVersion

SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Weights that checkpoints repeat, and that are the model's."""


class EagleHead(HeadModel):  # type: ignore[no-untyped-call]
    """The head; parameters have the names of the published checkpoints."""

    def __init__(
        self,
        config: LlamaConfig,
        embed: Callable[[torch.Tensor], torch.Tensor],
        unembed: Callable[[torch.Tensor], torch.Tensor],
        *,
        bias: bool,
    ) -> None:
        super().__init__(config, embed, config.hidden_size)
        self.unembed = unembed
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def guess(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The layer: embeddings and states [1, T, hidden] -> states [1, T, hidden]."""
        x = self.fc(torch.cat([embeds, states], dim=-1))
        rotary = self.rotary_emb(x, positions)
        hidden: torch.Tensor = self.layers[0](x, attention_mask=None, position_embeddings=rotary)
        return hidden

    def score(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [1, S, D] of ``guess``'s states, and the states that the next draft takes."""
        return self.unembed(states), states


def with_eagle(
    loaded: LoadedModel, args: EngineArgs, name: str, version: WeightVersion = BASE
) -> LoadedModel:
    """The model with the EAGLE head ``name``, a folder or a Hugging Face name.

    Args:
        version: of the weights, whose tensors of the head count before those of the folder.

    Raises:
        InvalidConfig: the head cannot be read, or is of another model.
    """
    require_states(loaded, args)
    folder = find_head(name, args)
    config = read_eagle(folder)
    require_fitting(folder, config, loaded.config.get_text_config(decoder=True))
    weights = read_tensors(folder) | draft_tensors(version)
    weights = {name: weight for name, weight in weights.items() if name not in SHARED}
    config._attn_implementation = "eager"  # until it is on pages
    parts = (embedding_of(loaded.model), head_of(loaded.model))
    head: Any = EagleHead(config, *parts, bias="fc.bias" in weights)
    fill(head, weights, partial(refuse, folder))
    head.to(loaded.device, loaded.model.dtype).eval().requires_grad_(False)
    return with_head(loaded, args, head, tap_last(loaded.model))


def read_eagle(folder: Path) -> LlamaConfig:
    """What the folder's config.json says.

    Raises:
        InvalidConfig: it is missing, or not that of an EAGLE head of one Llama layer.
    """
    said: dict[str, Any] = read_json(folder)
    if said.get("speculators_model_type") is not None:
        refuse(folder, "is of the speculators library; of EAGLE heads Rayfin reads the authors'")
    if any("Eagle3" in name for name in said.get("architectures") or ()):
        refuse(folder, "is an EAGLE-3 head: method 'eagle3'")
    try:
        config = LlamaConfig.from_dict(said)
    except (TypeError, ValueError, KeyError) as error:
        refuse(folder, f"has a config.json that cannot be read: {error}")
    if said.get("model_type", "llama") != "llama" or config.num_hidden_layers != 1:
        refuse(folder, "is not an EAGLE head: one layer of the Llama kind")
    return config

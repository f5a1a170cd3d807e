"""What heads have in common: a transformers model that takes states beside tokens."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class HeadModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A head over the tokens [1, T] behind ``given`` states. ``PagedModel`` puts it on pages.

    Args:
        embed: tokens [..., T] -> [..., T, hidden].
        width: of the model's states that ``narrow`` takes.
    """

    _supports_attention_backend = True

    def __init__(
        self, config: PretrainedConfig, embed: Callable[[torch.Tensor], torch.Tensor], width: int
    ) -> None:
        super().__init__(config)
        self.embed = embed
        self.width = width
        self.given: torch.Tensor | None = None  # [T, hidden], for the next forward
        self.left = torch.empty(0)  # [S, hidden] states of the last one

    def narrow(self, states: torch.Tensor) -> torch.Tensor:
        """The states [T, width] of the model as the head takes them: [T, hidden]."""
        return states

    def tokens_of(self, index: torch.Tensor) -> torch.Tensor:
        """The model's tokens for the indices [N] in the head's logits."""
        return index

    def guess(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The layer: embeddings and states [1, T, hidden] -> states [1, T, hidden]."""
        raise NotImplementedError

    def score(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [1, S, D] of ``guess``'s states, and the states that the next draft takes."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """Transformers' forward. Without ``given`` states tokens are their own, as in a probe."""
        embeds = self.embed(input_ids).to(self.dtype)
        states = embeds if self.given is None else self.given.to(embeds).unsqueeze(0)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=embeds.device).unsqueeze(0)
        out = self.guess(embeds, states, position_ids)
        if logits_to_keep is not None:
            out = out[:, logits_to_keep]
        logits, left = self.score(out)
        self.left = left[0]
        return CausalLMOutput(logits=logits)


SHARED = ("embed.", "unembed.")
"""Modules of the model that a head uses too."""


def fill(
    head: HeadModel, weights: Mapping[str, torch.Tensor], refuse: Callable[[str], NoReturn]
) -> None:
    """Puts ``weights`` into the head, or calls ``refuse`` with the reason why they do not fit."""
    expected = {
        name: weight for name, weight in head.state_dict().items() if not name.startswith(SHARED)
    }
    if missing := sorted(expected.keys() - weights.keys()):
        refuse(f"lacks {len(missing)} weights, {missing[0]} among them")
    if more := sorted(weights.keys() - expected.keys()):
        refuse(f"has {len(more)} unknown weights, {more[0]} among them")
    for name, weight in expected.items():
        if weight.shape != weights[name].shape:
            refuse(
                f"holds {name} of shape {list(weights[name].shape)}, and {list(weight.shape)} is "
                "what its config and the model want"
            )
    head.load_state_dict(weights, strict=False)

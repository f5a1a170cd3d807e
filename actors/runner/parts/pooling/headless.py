"""A decoder without its head, in the form of one with: its "logits" are its last hidden states."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

FACTORS = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}
"""Settings of heads, which must change no hidden state."""


class _Output(NamedTuple):
    logits: torch.Tensor


class HeadlessDecoder(nn.Module):
    """Wraps a base model, so that ``PagedModel`` and the compiled decoder run it as a whole one.

    Its head is the identity matrix: a product with it is exact.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.model = base
        self._is_stateful: bool = base._is_stateful
        self._supports_attention_backend: bool = base._supports_attention_backend
        size = base.config.get_text_config(decoder=True).hidden_size
        self.lm_head = nn.Linear(size, size, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(torch.eye(size, device=base.device), requires_grad=False)
        self.config = copy.deepcopy(base.config)
        for name, neutral in FACTORS.items():
            if hasattr(self.config, name):
                setattr(self.config, name, neutral)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    def num_parameters(self) -> int:
        count: int = self.model.num_parameters()
        return count

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        head: nn.Module = self.lm_head
        return head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | None = None,
        **options: Any,
    ) -> _Output:
        """The states [1, S, H] of the tokens at ``logits_to_keep``, or of all."""
        output = self.model(input_ids=input_ids, position_ids=position_ids, **options)
        states = output.last_hidden_state
        return _Output(states if logits_to_keep is None else states[:, logits_to_keep])

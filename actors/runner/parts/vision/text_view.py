"""The language model of a vision-language model, in the form of a model of its own."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from rayfin.actors.errors import UnsupportedModel


class _Output(NamedTuple):
    logits: torch.Tensor


class TextView(nn.Module):
    """Wraps the decoder and the head, so that ``PagedModel`` and the compiled decoder run them.

    Raises:
        UnsupportedModel: the model has no such parts.
    """

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__()
        model: Any = whole
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        name = type(whole).__name__
        if decoder is None or decoder is whole or head is None:
            raise UnsupportedModel(f"{name} cannot be served: it has no decoder apart", "model")
        self.model, self.lm_head = decoder, head
        self.config = whole.config.get_text_config(decoder=True)
        self.name = name
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self._is_stateful: bool = decoder._is_stateful
        self._supports_attention_backend: bool = decoder._supports_attention_backend

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    def get_input_embeddings(self) -> nn.Module:
        """What gives tokens their embeddings."""
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        head: nn.Module = self.lm_head
        return head

    def num_parameters(self) -> int:
        count: int = self.model.num_parameters()
        return count

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | None = None,
        **options: Any,
    ) -> _Output:
        """The logits [1, S, V] of the tokens at ``logits_to_keep``, or of all."""
        output = self.model(input_ids=input_ids, position_ids=position_ids, **options)
        states = output.last_hidden_state
        kept = states if logits_to_keep is None else states[:, logits_to_keep]
        logits = self.lm_head(kept)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return _Output(logits)

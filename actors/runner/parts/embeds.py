"""Admits a model to prompts that are embeddings: by a probe, not by its name.

A prompt of rows that are no token's, with tokens behind them and cut by chunks, must give the
logits of the model's own forward.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import UnsupportedModel
from rayfin.actors.media.part import ROWS, EmbedsFacts, EmbedsInput
from rayfin.actors.media.virtual_ids import row_ids
from rayfin.actors.messages import BoolArray, Int32Array, NewRequest, Sampling
from rayfin.actors.runner.cpu.decoder import compiled_decoder
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel, set_attention
from rayfin.actors.runner.models.replace import chunked_logits
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.parts.embeds_model import EmbedsModel, EmbedsSlots
from rayfin.actors.runner.parts.model_part import Decoder, ModelPart
from rayfin.actors.runner.parts.vision.load import ROUNDED, TOLERANCE

PROBE_ROWS, PROBE_TOKENS = 13, 4
PROBE_SLOT = 0
CUTS = (0, 1, PROBE_ROWS // 2, PROBE_ROWS + 2, PROBE_ROWS + 3, PROBE_ROWS + PROBE_TOKENS)
FLAG = "enable_prompt_embeds"


def make_embeds(args: EngineArgs, model: PreTrainedModel, rounded: bool) -> "EmbedsPart | None":
    """Returns the part of a model whose prompts may be embeddings; None if they may not."""
    return EmbedsPart(model, rounded=rounded) if args.enable_prompt_embeds else None


class EmbedsPart(ModelPart):
    """What a model has for prompts of embeddings, and what it makes of one before it is replaced.

    Args:
        rounded: its weights will have fewer bits.

    Raises:
        UnsupportedModel: it takes none.
    """

    def __init__(self, model: PreTrainedModel, *, rounded: bool) -> None:
        self._name = type(model).__name__
        self.slots = EmbedsSlots()
        self.observers = (self.slots,)
        self._dtype: torch.dtype = model.dtype
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        count = PROBE_ROWS + PROBE_TOKENS
        drawn = torch.tensor([(7919 * index + 11) % vocabulary for index in range(2 * count)])
        self._tokens = drawn[:count]
        self._text: torch.Tensor | None = None
        set_attention(model, "eager")
        try:
            self._rows, self._expected = _own_logits(model, drawn.to(model.device))
            if rounded:
                self._text = _forward(model, input_ids=self._tokens.to(model.device))
        except Exception as error:  # whatever a model's own code raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedModel(
                f"{self._name} takes no embeddings as prompts: {reason}", FLAG
            ) from error
        finally:
            set_attention(model, ATTENTION)

        self.facts = EmbedsFacts(size=self._rows.shape[-1])

    def alters(self, slots: Int32Array) -> BoolArray | None:
        return self.slots.alters(slots)

    def wrap(self, model: StepModel, decoder: Decoder) -> EmbedsModel:
        paged = decoder.paged
        limit = TOLERANCE.get(paged.dtype, 0.1)
        if self._text is not None:  # as far apart as text is
            logits = chunked_logits(model, paged, self._tokens.to(paged.device), CUTS)
            limit = max(ROUNDED, 2 * _apart(logits, self._text))
        scales = [1.0]  # some models scale all their inputs, others their tokens alone
        if (compiled := compiled_decoder(model)) is not None:
            scales.append(compiled.embedding_scale)
        for scale in scales:
            around = EmbedsModel(model, self.slots, self._dtype, scale)
            difference = self._difference(paged, around)
            if difference <= limit:
                return around
        raise UnsupportedModel(
            f"{self._name} cannot be served with embeddings as prompts: over pages its logits "
            f"differ from its own forward by {difference:.1e} of the largest one",
            FLAG,
        )

    def _difference(self, paged: PagedModel, around: EmbedsModel) -> float:
        rows = self._rows.float().cpu().numpy()
        ids = np.concatenate([row_ids(rows, "float32"), self._tokens.numpy()[PROBE_ROWS:]])
        parts = (EmbedsInput({ROWS: rows}, len(rows), "float32"),)
        request = NewRequest(PROBE_SLOT, Sampling(), len(ids), prompt_len=len(ids), parts=parts)
        self.slots.enter(request)
        tokens = torch.from_numpy(ids.astype(np.int64)).to(paged.device)
        try:
            logits = chunked_logits(around, paged, tokens, CUTS, slot=PROBE_SLOT)
        finally:
            self.slots.close()
        return _apart(logits, self._expected)


def _own_logits(model: PreTrainedModel, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are no token's, and logits [T, V] fp32 of these with tokens behind them."""
    with torch.inference_mode():
        first, second = model.get_input_embeddings()(drawn).chunk(2)
        whole = torch.cat([(first + second)[:PROBE_ROWS] / 2, first[PROBE_ROWS:]])
    return whole[:PROBE_ROWS], _forward(model, inputs_embeds=whole)


@torch.inference_mode()
def _forward(model: PreTrainedModel, **inputs: torch.Tensor) -> torch.Tensor:
    """The logits [T, V] fp32 of transformers' forward."""
    caller: torch.nn.Module = model
    batch = {name: value.unsqueeze(0) for name, value in inputs.items()}
    logits: torch.Tensor = caller(**batch, use_cache=False).logits[0].float()
    return logits


def _apart(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """How far logits are apart, as a share of the largest one."""
    return float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))

"""The comparison that admits a Whisper model: logits over pages with those of its own forward."""

from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutput

from rayfin.actors.media.part import MediaInput
from rayfin.actors.media.virtual_ids import put_virtual_ids
from rayfin.actors.media.whisper import SpeechTokens
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.models.replace import chunked_logits
from rayfin.actors.runner.parts.vision.load import PROBE_SLOT
from rayfin.actors.runner.parts.vision.media_slots import MediaSlots
from rayfin.actors.runner.parts.vision.vision_model import VisionModel
from rayfin.actors.runner.parts.whisper.decoder import WhisperDecoder


class DrawnStates:
    """Stands for the encoder in the comparison: it is transformers' own, and takes seconds."""

    def __init__(self, states: torch.Tensor) -> None:
        self._states = states  # [tokens, hidden]

    def embeddings(self, media: MediaInput, count: int, *, begins: bool = True) -> torch.Tensor:
        """The states [count, 1, hidden]."""
        return self._states.unsqueeze(1)


class Probe:
    """A clip of drawn states, a prompt, and the logits that transformers' forward gives for them.

    Args:
        tokens: those of a clip.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, speech: SpeechTokens, tokens: int) -> None:
        config, self._place = model.config, speech.place
        behind = [speech.start, speech.no_times, *range(5, 12)]
        self.clip = MediaInput(b"probe", 0, tokens, {})
        prompt = np.array([speech.place] * tokens + behind, np.int32)
        self._ids = put_virtual_ids(prompt, [self.clip], speech.place)
        drawn = torch.randn(tokens, config.d_model, generator=torch.Generator().manual_seed(0))
        self._states = drawn.to(model.device, model.dtype)
        heard = BaseModelOutput(self._states[None, : config.max_source_positions])
        ids = torch.tensor([behind], device=model.device)
        output = model(encoder_outputs=heard, decoder_input_ids=ids, use_cache=False)
        self._expected: torch.Tensor = output.logits[0].float()

    def difference(self, decoder: WhisperDecoder, page_size: int) -> float:
        """How far the logits over pages are off, as a share of the largest one."""
        tokens, first, count = self._ids, self.clip.length, len(self._ids)
        slots = MediaSlots(None)
        slots.enter(
            NewRequest(
                PROBE_SLOT,
                Sampling(),
                count,
                history=tokens,
                prompt_len=count,
                parts=(self.clip,),
            )
        )
        model = VisionModel(decoder, DrawnStates(self._states), slots, self._place)
        ids = torch.from_numpy(tokens.astype(np.int64)).to(decoder.device)
        cuts = [0, first // 2 + 1, first + 3, count - 1, count]
        logits = chunked_logits(model, decoder, ids, cuts, page_size, slot=PROBE_SLOT)[first:]
        largest = self._expected.abs().max().clamp(min=1e-6)
        return float((logits - self._expected).abs().max() / largest)

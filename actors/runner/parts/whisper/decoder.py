"""Whisper's decoder over pages, by the modules of transformers' model.

Source: Radford et al., 2022, "Robust Speech Recognition via Large-Scale Weak Supervision".
"""

from typing import Any

import torch

from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.models.recurrent import RecurrentLayers
from rayfin.actors.runner.parts.whisper.aligner import AlignedStep, Aligner
from rayfin.actors.runner.parts.whisper.rules import TranscriptRules
from rayfin.actors.runner.parts.whisper.split_step import SplitStep, split_step
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.write_kv import write_kv
from rayfin.kernels.shapes import PagedAttention, PagedBatch


class WhisperDecoder:
    """A ``StepModel``: requests are a clip and a transcript.

    The tokens of a clip bring the states of the encoder (``StepInputs.given``). They have no
    hidden states of their own: each layer keeps the keys and values that it makes of them.

    Args:
        model: ``WhisperForConditionalGeneration``.
        clip_tokens: in front of each prompt, whole pages.
    """

    def __init__(self, model: Any, kernel: PagedAttention, clip_tokens: int) -> None:
        self.transformer = model
        self.rules: TranscriptRules | None = None
        self.aligner: Aligner | None = None
        self.recurrent: RecurrentLayers | None = None
        self._decoder, self._kernel = model.model.decoder, kernel
        self._clip_tokens = clip_tokens
        self._states: int = model.config.max_source_positions
        self._heads: int = model.config.decoder_attention_heads
        size = model.config.d_model // self._heads
        self.layouts = [KVLayout(self._heads, size, size)] * len(self._decoder.layers)
        self._pages: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def device(self) -> torch.device:
        device: torch.device = self.transformer.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.transformer.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        size: int = self.transformer.config.vocab_size
        return size

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""
        self._pages = list(zip(cache.keys, cache.values, strict=True))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        step = split_step(inputs.batch, self._clip_tokens, self._states)
        if len(step.clips):
            self._keep_clips(inputs)
        if step.text is None:  # no token of a transcript is in it
            return torch.zeros(
                len(inputs.sampled), self.vocab_size, dtype=self.dtype, device=self.device
            )
        aligned = None if self.aligner is None else self.aligner.begin(inputs, step)
        states = self._transcripts(inputs.input_ids[step.tokens], step, aligned)
        rows = step.rows_of(inputs.sampled)
        logits: torch.Tensor = self.transformer.proj_out(states[rows])
        if self.rules is not None:
            logits = self.rules.applied(logits, inputs, step)
        return logits

    def _keep_clips(self, inputs: StepInputs) -> None:
        """Writes the keys and values of the states that the step's tokens bring."""
        given = inputs.given
        if given is None:  # a step that warms the model up
            return
        slots, states = inputs.batch.slots[given.index], given.states.to(self.dtype)
        for layer, (k_pages, v_pages) in zip(self._decoder.layers, self._pages, strict=True):
            attention = layer.encoder_attn
            keys, values = attention.k_proj(states), attention.v_proj(states)
            write_kv(self._by_head(keys), self._by_head(values), k_pages, v_pages, slots)

    def _transcripts(
        self, tokens: torch.Tensor, step: SplitStep, aligned: AlignedStep | None = None
    ) -> torch.Tensor:
        """The last hidden states [D, hidden] of the ``tokens`` [D]."""
        decoder, text, across = self._decoder, step.text, step.across
        assert text is not None and across is not None
        # Steps that warm the model up may go behind the last position.
        places = text.positions.clamp(max=decoder.embed_positions.weight.shape[0] - 1)
        x = decoder.embed_tokens(tokens) + decoder.embed_positions.weight[places]
        for number, (layer, (k_pages, v_pages)) in enumerate(
            zip(decoder.layers, self._pages, strict=True)
        ):
            normed = layer.self_attn_layer_norm(x)
            attention = layer.self_attn
            keys = self._by_head(attention.k_proj(normed))
            values = self._by_head(attention.v_proj(normed))
            write_kv(keys, values, k_pages, v_pages, text.slots)
            x = x + self._attend(attention, normed, k_pages, v_pages, text)
            normed = layer.encoder_attn_layer_norm(x)
            if aligned is not None:
                query = self._by_head(layer.encoder_attn.q_proj(normed))
                aligned.watch(number, query * layer.encoder_attn.scaling, k_pages)
            x = x + self._attend(layer.encoder_attn, normed, k_pages, v_pages, across)
            normed = layer.final_layer_norm(x)
            x = x + layer.fc2(layer.activation_fn(layer.fc1(normed)))
        last: torch.Tensor = decoder.layer_norm(x)
        return last

    def _attend(
        self,
        attention: Any,
        normed: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """The output [D, hidden] of self or cross attention; the keys are in their pages."""
        # As transformers has it: the query is scaled, not the scores.
        query = self._by_head(attention.q_proj(normed) * attention.scaling).contiguous()
        attended = self._kernel(query, k_pages, v_pages, batch, scale=1.0)
        out: torch.Tensor = attention.out_proj(attended.reshape(len(attended), -1))
        return out

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(rows), self._heads, -1)

"""An encoder of transformers' that computes several prompts as one packed row.

Position ids restart with each prompt, and attention stays inside it: transformers makes no mask for
a registered attention. At load, a pair of prompts is computed packed and each alone, and an encoder
whose results differ is refused.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from rayfin.actors.errors import UnsupportedModel
from rayfin.actors.messages import Int32Array
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.models.recurrent import RecurrentLayers
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.torch_backend import segment_attention

ATTENTION = "rayfin_encoder"
SEGMENTS = "rayfin_segments"  # the attribute of an attention module that holds the segments
VECTOR = 32  # floats of the widest loop of torch's kernels
PROBE_LENGTHS = (11, 7)
TOLERANCE = 1e-4


class Segments:
    """The prompts of the row that a model is computing, shared by all its layers."""

    def __init__(self) -> None:
        self.starts: Int32Array = np.zeros(1, np.int32)  # [S + 1]
        self.asked = 0  # attentions of a forward


def encoder_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function in transformers' attention registry."""
    if attention_mask is not None:
        name = type(module).__name__
        raise UnsupportedModel(f"{name} cannot be served: it attends through its own mask", "model")
    segments: Segments = getattr(module, SEGMENTS)
    segments.asked += 1
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = segment_attention(q, k, v, segments.starts, scale=scale, window=sliding_window)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, encoder_attention)


class EncoderModel:
    """A ``StepModel`` whose "logits" are hidden states; it keeps nothing between steps.

    Raises:
        UnsupportedModel: a packed pair differs from its parts alone.
    """

    def __init__(self, base: Any) -> None:
        self._model = base
        self._segments = Segments()
        for module in base.modules():
            setattr(module, SEGMENTS, self._segments)
        self.position_offset = position_offset(base)
        self._types = getattr(base.config, "type_vocab_size", 0) or 0
        self.layouts: list[KVLayout] = []
        self.recurrent: RecurrentLayers | None = None
        self._padded = padded_tokens(base)
        self._probe()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @property
    def transformer(self) -> Any:
        return self._model

    def bind(self, cache: KVTensors) -> None:
        """Does nothing: an encoder has no pages."""

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The hidden states [S, H] of the tokens at ``inputs.sampled``."""
        batch = inputs.batch
        states = self._states(
            *(inputs.input_ids, batch.positions),
            np.asarray(batch.query_start_cpu, np.int32),
            inputs.token_types,
        )
        return states[inputs.sampled]

    def _states(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        starts: Int32Array,
        types: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H] of the packed tokens [T]."""
        count = len(ids)
        if padding := -count % self._padded:
            ids, positions = (
                nn.functional.pad(tensor, (0, padding)) for tensor in (ids, positions)
            )
            types = None if types is None else nn.functional.pad(types, (0, padding))
            starts = np.append(starts, np.int32(count + padding))
        self._segments.starts = starts
        self._segments.asked = 0
        more: dict[str, torch.Tensor] = {}
        if self._types > 1:
            types = torch.zeros_like(ids) if types is None else types
            more["token_type_ids"] = types.unsqueeze(0)
        output = self._model(
            input_ids=ids.unsqueeze(0),
            position_ids=(positions + self.position_offset).unsqueeze(0),
            **more,
        )
        states: torch.Tensor = output.last_hidden_state[0, :count]
        return states

    @torch.inference_mode()
    def _probe(self) -> None:
        config, device = self._model.config, self._model.device
        total = sum(PROBE_LENGTHS)
        ids = (torch.arange(total, device=device) * 7919 + 5) % config.vocab_size
        parts = [torch.arange(length, device=device) for length in PROBE_LENGTHS]
        starts = np.cumsum([0, *PROBE_LENGTHS]).astype(np.int32)
        packed = self._states(ids, torch.cat(parts), starts, None)
        layers = config.num_hidden_layers
        difference = 0.0
        for start, positions in zip(starts.tolist(), parts, strict=False):
            end = start + len(positions)
            whole = np.array([0, len(positions)], np.int32)
            alone = self._states(ids[start:end], positions, whole, None)
            difference = max(difference, float((packed[start:end] - alone).abs().max()))
        if self._segments.asked != layers or not difference <= TOLERANCE * float(
            packed.abs().max()
        ):
            raise UnsupportedModel(
                f"{type(self._model).__name__} cannot be served: a packed pair of prompts differs "
                "from each alone",
                "model",
            )


def padded_tokens(base: Any) -> int:
    """Tokens of whose multiple a row is made on a CPU, so that bits depend on no other prompt.

    Torch computes the end of an array that does not fill a vector by other instructions, whose
    last bits differ. Sizes of real models are multiples of it.
    """
    if base.device.type != "cpu":
        return 1
    config = base.config
    head = config.hidden_size // config.num_attention_heads
    intermediate = getattr(config, "intermediate_size", None) or config.hidden_dim
    common = math.gcd(head // 2, config.hidden_size, intermediate)
    return VECTOR // math.gcd(VECTOR, common)


def position_offset(base: Any) -> int:
    """What the model adds to positions: RoBERTa's kinds count from behind the padding id."""
    embeddings: Any = getattr(base, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1
    return 0

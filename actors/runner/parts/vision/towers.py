"""How transformers' encoders are run: what differs between those of images and those of audio."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from rayfin.actors.errors import UnsupportedModel
from rayfin.actors.media.kinds import MediaKind

COMPUTED = ("pixel_values", "input_features", "input_values")
"""Arrays that encoders compute with, in their own dtype; the others are masks and sizes."""


@dataclass(frozen=True, slots=True)
class Tower:
    """A model's encoder. ``run`` gives its embeddings as ``pooler_output``, parts or one tensor."""

    run: Callable[..., Any]
    accepts: frozenset[str]  # names of arrays

    def __call__(self, arrays: Mapping[str, np.ndarray], device: Any, dtype: torch.dtype) -> Any:
        """What ``run`` gives for an image or a clip."""
        fields = tensors(arrays, device, dtype)
        accepted = {name: field for name, field in fields.items() if name in self.accepts}
        return self.run(**accepted, return_dict=True)


def find_tower(model: Any, kind: MediaKind) -> Tower:
    """The encoder of transformers' base ``model``.

    Raises:
        UnsupportedModel: it cannot be run apart.
    """
    run = getattr(model, f"get_{kind}_features", None)
    if run is None and kind == "audio" and hasattr(model, "multi_modal_projector"):
        run = _OfForward(model)
    if run is None:
        name = type(model).__name__
        raise UnsupportedModel(f"{name} cannot be served: it has no {kind} features", "model")
    return Tower(run, frozenset(inspect.signature(run).parameters))


def tensors(
    arrays: Mapping[str, np.ndarray], device: Any, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The arrays as a model takes them."""
    fields = {name: torch.from_numpy(np.array(array)).to(device) for name, array in arrays.items()}
    for name in COMPUTED:
        if name in fields:
            fields[name] = fields[name].to(dtype)
    return fields


def model_class(config: PretrainedConfig, kind: MediaKind) -> Any:
    """The class of transformers that loads a model of this ``config``."""
    if kind == "image":
        return AutoModelForImageTextToText
    if config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return AutoModelForMultimodalLM
    return AutoModelForSeq2SeqLM


class _OfForward:
    """``get_audio_features`` of a model that has it inside its forward only: Qwen2-Audio."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, input_features: torch.Tensor, feature_attention_mask: torch.Tensor, **_: Any
    ) -> BaseModelOutputWithPooling:
        """The embeddings of mel features [B, mels, F], of which a mask [B, F] says the length."""
        tower, device = self._model.audio_tower, input_features.device
        inner, outer = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
        frames = (input_features.shape[-1] - 2) // 2 + 1  # that the tower attends over
        seen = torch.arange(frames, device=device) < inner[:, None]
        mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=input_features.new_zeros(len(seen), frames, 1),
            attention_mask=seen.long(),
        )
        states = tower(input_features, attention_mask=mask).last_hidden_state
        embeddings = self._model.multi_modal_projector(states)
        real = torch.arange(embeddings.shape[1], device=device) < outer[:, None]
        return BaseModelOutputWithPooling(pooler_output=embeddings[real])

"""The parts of models that are read from a checkpoint or put around a decoder, in one list each.

A new part is one line here; ``checkpoint.py`` names none. ``loading.py`` adds those that need
no modelling code, and says what does not go together.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rayfin.actors.config import EngineArgs
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.runner.parts.embeds import make_embeds
from rayfin.actors.runner.parts.lora.load import make_adapters
from rayfin.actors.runner.parts.model_part import ModelPart, Weights
from rayfin.actors.runner.parts.pooling.load import load_encoder, read_pooling
from rayfin.actors.runner.parts.vision.load import read_media
from rayfin.actors.runner.parts.whisper.load import load_whisper

if TYPE_CHECKING:
    from rayfin.actors.runner.loading import LoadedModel

Source = tuple[EngineArgs, PretrainedConfig, torch.device, PoolingRecipe | None]

WHOLE: "tuple[Callable[[*Source], LoadedModel | None], ...]" = (load_encoder, load_whisper)
"""Each loads a model that is no decoder over pages as any other, or returns None."""

WITH_WEIGHTS: tuple[Callable[[*Source], Weights | None], ...] = (read_pooling, read_media)
"""Each reads the decoder of a model that comes with a part of it, or returns None."""

AROUND: tuple[Callable[[EngineArgs, PreTrainedModel, bool], ModelPart | None], ...] = (
    make_adapters,
    make_embeds,
)
"""Each makes a part that any decoder can have, or returns None if the settings ask for none."""


def load_whole(*source: *Source) -> "LoadedModel | None":
    """Loads a model that is no decoder over pages as any other; None: it is one.

    Raises:
        InvalidConfig, UnsupportedModel: the model cannot be served.
    """
    loaded = (load(*source) for load in WHOLE)
    return next((model for model in loaded if model is not None), None)


def read_with_parts(*source: *Source) -> Weights | None:
    """Reads a decoder that comes with parts; None: it comes alone.

    Raises:
        InvalidConfig, UnsupportedModel: the model cannot be served.
    """
    read = (reader(*source) for reader in WITH_WEIGHTS)
    return next((weights for weights in read if weights is not None), None)


def parts_around(args: EngineArgs, model: PreTrainedModel, rounded: bool) -> list[ModelPart]:
    """Returns the parts that the settings ask for, of any decoder.

    Args:
        model: as transformers has it, before it is over pages.
        rounded: its weights will have fewer bits.
    """
    parts = (make(args, model, rounded) for make in AROUND)
    return [part for part in parts if part is not None]

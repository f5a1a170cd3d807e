"""What models read beside text: images, or clips of audio."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rayfin.actors.config import EngineArgs
from rayfin.actors.model_files.plain_config import is_known_decoder

if TYPE_CHECKING:  # transformers takes seconds, and a server of text needs none of this
    from transformers import PretrainedConfig

MediaKind: TypeAlias = Literal["image", "audio"]

SAME_CLASS = {"gemma3"}
"""Models whose class for images is that for text too: with a processor they read images."""


SPEECH_MODELS = {"whisper"}
"""Encoder-decoders that are served: their prompts begin with a clip."""


def media_kind(config: "PretrainedConfig") -> MediaKind | None:
    """What a model reads beside text, as transformers has it; None: nothing.

    A model that it has as a plain language model too is served as that one, with a few exceptions.
    One that reads images and hears is served with its images.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    if kind in SPEECH_MODELS:
        return "audio"
    plain = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in SAME_CLASS
    if plain or config.is_encoder_decoder:
        return None
    if kind in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return "image"
    names = (
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    hears = hasattr(config, "audio_token_id") and any(kind in table for table in names)
    return "audio" if hears else None


def served_media(args: EngineArgs, config: "PretrainedConfig") -> MediaKind | None:
    """With which tower the model of these settings, of this ``config``, is loaded, if any."""
    kind = media_kind(config)
    if config.model_type in SAME_CLASS and not has_processor(args):
        return None
    return kind


def model_media(args: EngineArgs) -> MediaKind | None:
    """What the model of these settings reads beside text."""
    if args.language_model_only or is_known_decoder(args):
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            args.model, trust_remote_code=args.trust_remote_code, **args.hub
        )
    except (OSError, ValueError):
        return None  # the runner, which loads the model, says why
    return served_media(args, config)


def has_processor(args: EngineArgs) -> bool:
    """Whether the model's folder says how images are processed."""
    from transformers.utils.hub import cached_file

    names = ("preprocessor_config.json", "processor_config.json")
    paths: list[Any] = [
        cached_file(
            args.model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **args.hub,
        )
        for name in names
    ]
    return any(paths)

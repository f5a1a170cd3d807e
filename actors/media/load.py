"""The processor of a model that reads more than text."""

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.media.kinds import MediaKind, model_media
from rayfin.actors.media.processed import WORDS, MediaProcessor


def load_processor(args: EngineArgs) -> MediaProcessor | None:
    """The processor of the model's folder, or None if the model reads text only.

    Raises:
        InvalidConfig: a file is missing, or transformers does not make a processor of it.
    """
    kind = model_media(args)
    if kind is None:
        return None
    try:
        return _load(args, kind)
    except (OSError, ValueError, ImportError, AttributeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidConfig(
            f"{args.model} reads {WORDS[kind][1]}, and its processor cannot be loaded: "
            f"{reason[0]}. Give its files, or language_model_only",
            "model",
        ) from error


def _load(args: EngineArgs, kind: MediaKind) -> MediaProcessor:
    if kind == "audio":
        from rayfin.actors.media.audio_processor import AudioProcessor

        return AudioProcessor.load(args)
    from rayfin.actors.media.image_processor import ImageProcessor

    return ImageProcessor.load(args)

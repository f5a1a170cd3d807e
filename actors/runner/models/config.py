"""What a model's configuration says: whether it can be served, and its positions.

This module imports none of transformers' classes until a configuration is loaded: a start from
packed weights (``--weights-cache``) of a known decoder needs none.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub.errors import StrictDataclassError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.media.kinds import SPEECH_MODELS, media_kind
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.model_files.shards import why_ctranslate2
from rayfin.actors.runner.models.overrides import overridden
from rayfin.actors.runner.quantized.config import adopt_modelopt

if TYPE_CHECKING:  # with the classes of all families, which take seconds
    from transformers import PretrainedConfig


def load_config(args: EngineArgs, recipe: PoolingRecipe | None = None) -> "PretrainedConfig":
    """The model's Hugging Face configuration.

    Args:
        recipe: of a model that pools.

    Raises:
        InvalidConfig: The folder or name does not exist, or has no configuration.
        UnsupportedModel: It is not a decoder that a paged cache can serve, nor a known encoder.
    """
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            args.model, trust_remote_code=args.trust_remote_code, **args.hub
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        raise InvalidConfig(why_not_loaded(args.model, error), "model") from None
    adopt_modelopt(config, args.model, **args.hub)
    if args.hf_overrides:
        remote = args.trust_remote_code and hasattr(config, "auto_map")
        config = overridden(config, args.hf_overrides, any_name=remote)
    if recipe is None:
        _refuse_unservable(config)
    elif not recipe.encoder:
        _refuse_unpageable(config)
    return config


def max_position(config: "PretrainedConfig") -> int | None:
    """The largest number of positions of the model, or None if it has no limit.

    A rotary embedding that changes with the longest request of the batch ("longrope", "dynamic")
    would make a request's tokens depend on the batch. Such a model is limited to the positions that
    it was first trained on, where the embedding does not change.
    """
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if config.model_type in SPEECH_MODELS:
        limit = config.max_target_positions
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        return original or limit
    return limit


def _refuse_unservable(config: "PretrainedConfig") -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    _refuse_unpageable(config)
    if media_kind(config) is not None:
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        raise UnsupportedModel(unsupported(config, "it is not a causal language model"), "model")


def _refuse_unpageable(config: "PretrainedConfig") -> None:
    if config.is_encoder_decoder and config.model_type not in SPEECH_MODELS:
        raise UnsupportedModel(unsupported(config, "it is an encoder-decoder"), "model")


def unsupported(config: "PretrainedConfig", why: str) -> str:
    """One line that says that a model is not served, and why."""
    names = ", ".join(config.architectures or [type(config).__name__])
    return f"{names} cannot be served: {why}"


def why_not_loaded(model: str, error: Exception) -> str:
    """One line that says why the model could not be loaded."""
    path = Path(model)
    if not path.exists() and (path.is_absolute() or model.startswith((".", "~"))):
        return f"there is no folder {model}"
    if path.is_dir() and not (path / "config.json").exists():
        return f"{model} holds no config.json"
    if (why := why_ctranslate2(path)) is not None:
        return why
    if isinstance(error, StrictDataclassError):  # its first line has no reason
        return f"cannot load {model!r}: config.json: {' '.join(str(error).split())}"
    first_line = next((line for line in str(error).splitlines() if line.strip()), "unknown error")
    return f"cannot load {model!r}: {first_line.strip()}"

"""Which parts go with a model and with one another; the parts that need no modelling code."""

from typing import TYPE_CHECKING

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.media.kinds import served_media
from rayfin.actors.pooling.recipe import PoolingRecipe
from rayfin.actors.runner.parts.grammars.load import GrammarsPart
from rayfin.actors.runner.parts.model_part import ModelPart

if TYPE_CHECKING:  # it imports all classes of configurations
    from transformers import PretrainedConfig


def check_parts(
    args: EngineArgs, config: "PretrainedConfig", recipe: PoolingRecipe | None, ranks: int
) -> None:
    """Refuses settings that the parts of a model, which ``ranks`` devices share, do not go with.

    Raises:
        InvalidConfig, UnsupportedModel: ``param`` is the setting.
    """
    if args.enable_prompt_embeds and (why := _why_no_embeds(args, config, recipe, ranks)):
        raise InvalidConfig(f"enable_prompt_embeds {why}", "enable_prompt_embeds")
    if recipe is not None and args.serves_lora:
        raise InvalidConfig("enable_lora is for models that generate", "enable_lora")
    if recipe is not None and ranks > 1:
        why = "a pooling model runs on one device: use data_parallel_size"
        raise InvalidConfig(why, "tensor_parallel_size")
    if recipe is None and (args.serves_lora or ranks > 1) and served_media(args, config):
        name = ", ".join(config.architectures or [type(config).__name__])
        if ranks > 1:
            raise UnsupportedModel(f"{name} cannot be shared by several devices", "model")
        raise UnsupportedModel(f"{name} cannot be served with LoRA adapters", "enable_lora")


def parts_of_tokens(args: EngineArgs, vocab_size: int, *, alone: bool) -> tuple[ModelPart, ...]:
    """Returns the parts of every model that samples tokens.

    Args:
        alone: no other rank computes the same steps.
    """
    return (GrammarsPart(args, vocab_size, limited=alone),)


def _why_no_embeds(
    args: EngineArgs, config: "PretrainedConfig", recipe: PoolingRecipe | None, ranks: int
) -> str | None:
    """Returns why prompts cannot be embeddings, or None."""
    if ranks > 1:
        return "is for one device, not for several that share a model: use data_parallel_size"
    if recipe is not None:
        return "is for models that generate"
    if not args.language_model_only and served_media(args, config) is not None:
        return "is for models of text: language_model_only serves the text of this one"
    if args.speculation is not None and args.speculation.reads_states:
        return "does not go with heads that draft: use an n-gram, suffix or draft_model method"
    return None

"""The fast tokenizer of a model, as ``AutoTokenizer`` makes it.

``AutoTokenizer`` imports torch and all configuration classes to choose a class. For most folders
the names in two files decide which one it takes, so that class is imported alone.
"""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.files import read_object

TRANSFORMERS = "5.24."
"""The release whose choices these are; any other one chooses itself."""

GENERIC = frozenset(
    (
        *("llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
        *("olmo", "olmo2", "olmo3", "granite", "smollm3", "gpt_oss", "gpt2", "gpt_neox"),
        *("deepseek_v2", "deepseek_v3", "glm", "glm4", "stablelm", "starcoder2"),
    )
)
CHOICES: dict[str, tuple[str, frozenset[str]]] = {
    "TokenizersBackend": ("PreTrainedTokenizerFast", GENERIC),
    "PreTrainedTokenizerFast": ("PreTrainedTokenizerFast", GENERIC),
    "Qwen2Tokenizer": ("Qwen2Tokenizer", frozenset(("qwen2", "qwen3", "qwen3_moe"))),
    "GPT2Tokenizer": ("GPT2Tokenizer", frozenset(("llama", "gpt2", "starcoder2"))),
    "GemmaTokenizer": ("GemmaTokenizer", frozenset(("gemma", "gemma2", "gemma3_text"))),
}
"""By the class that tokenizer_config.json names: the class that is taken, for these model types."""

REBUILT = frozenset(("Qwen2Tokenizer", "GPT2Tokenizer", "GemmaTokenizer"))
"""Classes that read no more than vocabulary and merges out of tokenizer.json: those of BPE."""

MODEL_TYPE = re.compile(rb'"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"')
"""The kind of model in tokenizer.json, where the tokenizers package writes it."""

OTHER_FORMS = ("tekken.json", "tokenizer.model.v3")
"""Files that may decide in place of tokenizer.json."""


def load_fast(tokenizer: str, trust_remote_code: bool = False, **hub: Any) -> Any:
    """The fast tokenizer of a folder, or of a name on the ``hub`` (``EngineArgs.tokenizer_hub``).

    Raises:
        InvalidConfig: there is none, or none with a fast form.
    """
    from transformers import PreTrainedTokenizerFast

    maker = None if trust_remote_code else chosen_class(tokenizer)
    try:
        if maker is None:
            from transformers import AutoTokenizer

            auto: Any = AutoTokenizer
            fast = auto.from_pretrained(tokenizer, trust_remote_code=trust_remote_code, **hub)
        else:
            fast = maker.from_pretrained(tokenizer, **hub)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InvalidConfig(f"Cannot load a tokenizer from {tokenizer}: {reason}") from error
    if not isinstance(fast, PreTrainedTokenizerFast):
        raise InvalidConfig(
            f"The tokenizer of {tokenizer} has no fast form (tokenizer.json); Rayfin needs one."
        )
    return fast


def chosen_class(tokenizer: str) -> Any | None:
    """The class of ``AutoTokenizer``'s choice, or None where only that can tell."""
    import transformers

    name = chosen_name(tokenizer)
    return None if name is None else getattr(transformers, name)


def chosen_name(tokenizer: str) -> str | None:
    """Its name, without an import of transformers.

    Only of a folder: a name on the Hub may decide as well.
    """
    if not version("transformers").startswith(TRANSFORMERS) or not Path(tokenizer).is_dir():
        return None
    settings = read_object(tokenizer, "tokenizer_config.json")
    config = read_object(tokenizer, "config.json")
    named, kind = settings.get("tokenizer_class"), config.get("model_type")
    if not isinstance(named, str) or not isinstance(kind, str):
        return None
    if "auto_map" in settings or "auto_map" in config or "model_name" in config:
        return None
    if any(Path(tokenizer, name).exists() for name in OTHER_FORMS):
        return None
    taken, kinds = CHOICES.get(named, (None, frozenset()))
    if taken is None or kind not in kinds or not Path(tokenizer, "tokenizer.json").is_file():
        return None
    added = settings.get("added_tokens_decoder", {})
    if not isinstance(added, dict) or not all(isinstance(token, dict) for token in added.values()):
        return None
    if taken in REBUILT and _form(tokenizer) != "BPE":
        return None
    return taken


def _form(tokenizer: str) -> str | None:
    """The kind of model in tokenizer.json: searched for, as the file may have tens of MB."""
    try:
        match = MODEL_TYPE.search(Path(tokenizer, "tokenizer.json").read_bytes())
    except OSError:
        return None
    return None if match is None else match[1].decode()

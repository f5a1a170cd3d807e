"""What a model's files say of its answers: where they end, and how they are sampled."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfin.actors.model_files.files import find_file, model_json

FILE = "generation_config.json"

TEXT_PARTS = ("decoder", "generator", "text_config")
"""Where config.json has the values of its part that writes text; the first one counts."""


def generation_config(model: str | Path, **hub: Any) -> dict[str, Any]:
    """Reads the values that transformers' ``generate`` takes from a folder, or a model on the Hub.

    If there is a generation_config.json, it alone decides: what it lacks is not set. Otherwise it
    is config.json, where a value of the whole model counts before one of its text part.

    Raises:
        InvalidConfig: a file is not a JSON object.
    """
    if find_file(str(model), FILE, **hub) is not None:
        return model_json(model, FILE, **hub)
    config = model_json(model, "config.json", **hub)
    part = next((config[name] for name in TEXT_PARTS if config.get(name)), None)
    both = (part if isinstance(part, Mapping) else {}, config)
    return {name: value for held in both for name, value in held.items() if value is not None}


def end_token_ids(values: Mapping[str, Any]) -> frozenset[int]:
    """Returns the ids that end an answer, by ``generation_config`` or changes of it."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return frozenset(
        token for token in ids if isinstance(token, int) and not isinstance(token, bool)
    )

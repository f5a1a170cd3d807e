"""Where a model's name leads."""

from dataclasses import replace
from pathlib import Path

from rayfin.actors.config import EngineArgs

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo" / "model"


def model_path(name: str) -> str:
    """A folder or a Hugging Face name; ``demo`` is the toy model that Rayfin brings along."""
    return str(DEMO_FOLDER) if name == DEMO else name


def located(args: EngineArgs) -> EngineArgs:
    """The same with the place of the model instead of its name."""
    return replace(args, model=model_path(args.model))


def tokenizer_path(args: EngineArgs) -> str:
    """Where the tokenizer of an engine comes from."""
    return model_path(args.tokenizer or args.model)

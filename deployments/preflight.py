"""Mistakes that can be told before anything starts: a bad folder, a model that is not served."""

from dataclasses import replace

from rayfin.actors.config import EngineArgs
from rayfin.deployments.models import model_path, tokenizer_path


def check_model(args: EngineArgs, *, tokenizer: bool = True) -> None:
    """Reads the model's configuration and tokenizer, not its weights.

    Raises:
        InvalidConfig, UnsupportedModel: the model cannot be served, and why.
    """
    from huggingface_hub.utils import logging as hub_logging

    from rayfin.actors.runner.weights import load_config, require_safetensors
    from rayfin.deployments.text.tokenizer import Tokenizer

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # one clear line at the end, not one for each retry
    located = replace(args, model=model_path(args.model))
    load_config(located)
    if args.load_format != "dummy":
        require_safetensors(located.model)
    if tokenizer:
        Tokenizer.load(tokenizer_path(args), args.revision, args.trust_remote_code)

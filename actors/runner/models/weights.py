"""Loads a transformers model from a folder or a Hugging Face name."""

import threading
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.model_files.shards import place_in_index, require_safetensors
from rayfin.actors.runner.models.config import unsupported, why_not_loaded
from rayfin.actors.runner.models.dtypes import resolve_dtype
from rayfin.actors.runner.models.mapped_weights import hold_dense, hold_narrow, narrow_loads
from rayfin.actors.runner.models.progress import logged_load
from rayfin.actors.runner.quantized.loader import dequantize, plain, prepare

LOADING = threading.Lock()
"""transformers and ``narrow_loads`` change classes while they load: one model after the other."""


def load_model(
    args: EngineArgs,
    config: PretrainedConfig,
    device: torch.device,
    attention: str | dict[str, str],
    kind: Any = AutoModelForCausalLM,
    *,
    keep_quantized: bool = False,
    narrow: bool = False,
) -> PreTrainedModel:
    """The model in evaluation mode on ``device``, its attention dispatched to ``attention``.

    ``load_format="dummy"`` draws random weights from ``seed`` and reads no file.

    Args:
        attention: its name in transformers' registry, or one for each part of the model.
        kind: the class of transformers that makes it. Of ``AutoModel`` the pooler may be missing.
        keep_quantized: leaves quantised layers as the checkpoint has them (``QuantLinear``,
            ``QuantExperts``).
        narrow: keeps 16-bit weights of a checkpoint, and dequantized ones, in a CPU's float32 model
            (mapped_weights.py), until the caller packs or widens them.

    Raises:
        InvalidConfig: Weights are missing, broken, of other shapes or not safetensors.
        UnsupportedModel: transformers cannot dispatch this architecture's attention.
    """
    dtype = resolve_dtype(args, config, device)
    if args.load_format == "dummy":
        plain(config)
    else:
        prepare(config, experts_on=device if keep_quantized else None)
    narrow = narrow and device.type == "cpu"
    with LOADING, narrow_loads(narrow) as names:
        try:
            options = {"dtype": dtype, "attn_implementation": attention}
            model = _load(args, config, device, options, kind)
        except KeyError as error:  # it looks for a class of its own by this name
            if error.args != (attention,):
                raise
            options = {"dtype": dtype, "attn_implementation": "eager"}
            model = _load(args, config, device, options, kind)
    hold_narrow(model, names)
    if not keep_quantized:
        layers = dequantize(model)
        hold_dense(layers if narrow else ())
    return model


def _load(
    args: EngineArgs,
    config: PretrainedConfig,
    device: torch.device,
    options: dict[str, Any],
    kind: Any,
) -> PreTrainedModel:
    try:
        if args.load_format == "dummy":
            torch.manual_seed(args.seed)
            with device:
                model = kind.from_config(
                    config, trust_remote_code=args.trust_remote_code, **options
                )
        else:
            require_safetensors(args.model)
            with logged_load(args.model):
                loaded: Any = kind.from_pretrained(
                    args.model,
                    config=config,
                    trust_remote_code=args.trust_remote_code,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # refused below, by name
                    **args.hub,
                    **options,
                )
            model, report = loaded
            if kind is AutoModel:
                missing = report["missing_keys"]
                report["missing_keys"] = {
                    name for name in missing if not name.startswith("pooler.")
                }
            _require_all_weights(args.model, report)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidConfig(why_not_loaded(args.model, error), "model") from None
    served: PreTrainedModel = model.to(device).eval()
    return served.requires_grad_(False)


def dispatch_refused(config: PretrainedConfig, attention: str, error: KeyError) -> Exception:
    """The error to raise for a KeyError from making a model: its attention may lack dispatch."""
    if error.args != (attention,):
        return error
    return UnsupportedModel(unsupported(config, "its attention cannot be paged"), "model")


def require_pageable(model: PreTrainedModel) -> None:
    """Raises unless transformers dispatches the model's attention and it has no other state.

    Raises:
        UnsupportedModel: The model's attention cannot be paged.
    """
    if not model._supports_attention_backend and not model._is_stateful:
        raise UnsupportedModel(unsupported(model.config, "its attention cannot be paged"), "model")


def _require_all_weights(model: str, report: dict[str, Any]) -> None:
    # transformers initializes missing weights at random, and the model would produce nonsense.
    if missing := sorted(report["missing_keys"]):
        first = f"{missing[0]}{place_in_index(model, missing[0])}"
        raise InvalidConfig(f"{model} lacks {len(missing)} weights, {first} among them", "model")
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise InvalidConfig(
            f"{model} holds {name} of shape {list(stored)}, its config wants {list(expected)}",
            "model",
        )

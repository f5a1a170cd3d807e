"""Loads a transformers model from a folder or a Hugging Face name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.images.processor import reads_images
from rayfin.actors.pooling.recipe import PoolingRecipe
from rayfin.actors.runner.models.narrow import hold_dense, hold_narrow, narrow_loads
from rayfin.actors.runner.models.progress import logged_load
from rayfin.actors.runner.quantized.loader import dequantize, plain, prepare
from rayfin.actors.settings.choices import KVCacheDtype
from rayfin.kernels.attention.select import page_types
from rayfin.kernels.shapes import PagedAttention

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CONFIG_ERRORS = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)


def load_config(args: EngineArgs, recipe: PoolingRecipe | None = None) -> PretrainedConfig:
    """The model's Hugging Face configuration.

    Args:
        recipe: of a model that pools.

    Raises:
        InvalidConfig: The folder or name does not exist, or has no configuration.
        UnsupportedModel: It is not a decoder that a paged cache can serve, nor a known encoder.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            args.model, trust_remote_code=args.trust_remote_code, **args.hub
        )
    except (OSError, ValueError) as error:
        raise InvalidConfig(why_not_loaded(args.model, error), "model") from None
    if args.hf_overrides:
        config = overridden(config, args.hf_overrides)
    if recipe is None:
        _refuse_unservable(config)
    elif not recipe.encoder:
        _refuse_unpageable(config)
    return config


def overridden(config: PretrainedConfig, changes: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration with some of its values replaced; objects are merged, as vLLM does.

    Raises:
        InvalidConfig: The model's configuration does not take a value.
    """
    values = _merged(config.to_dict(), changes)
    values.pop("transformers_version", None)
    try:
        changed: PretrainedConfig = type(config).from_dict(values)
    except (*CONFIG_ERRORS, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise InvalidConfig(f"hf_overrides: {reason}", "hf_overrides") from error
    changed.name_or_path = config.name_or_path
    return changed


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, change in changes.items():
        known = merged.get(name)
        both = isinstance(known, Mapping) and isinstance(change, Mapping)
        merged[name] = _merged(known, change) if both else change  # type: ignore[arg-type]
    return merged


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
        keep_quantized: leaves quantised layers as the checkpoint has them (``QuantLinear``).
        narrow: keeps 16-bit weights of a checkpoint, and dequantized ones, in a CPU's float32 model
            (narrow.py), until the caller packs or widens them.

    Raises:
        InvalidConfig: Weights are missing, broken, of other shapes or not safetensors.
        UnsupportedModel: transformers cannot dispatch this architecture's attention.
    """
    dtype = resolve_dtype(args, config, device)
    if args.load_format == "dummy":
        plain(config)
    else:
        prepare(config)
    narrow = narrow and device.type == "cpu"
    with narrow_loads(narrow) as names:
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
    return UnsupportedModel(_unsupported(config, "its attention cannot be paged"), "model")


def require_pageable(model: PreTrainedModel) -> None:
    """Raises unless transformers dispatches the model's attention and it has no other state.

    Raises:
        UnsupportedModel: The model's attention cannot be paged.
    """
    if not model._supports_attention_backend and not model._is_stateful:
        raise UnsupportedModel(_unsupported(model.config, "its attention cannot be paged"), "model")


def resolve_dtype(args: EngineArgs, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """The model's dtype. ``auto`` is the checkpoint's dtype on a GPU and float32 on a CPU.

    float32 is exact for a bf16 checkpoint, and torch's 16-bit matrix products on an AVX2 CPU are
    several times slower than its float32 ones.
    """
    if args.dtype != "auto":
        return DTYPES[args.dtype]
    if device.type == "cpu":
        return torch.float32
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16


def max_position(config: PretrainedConfig) -> int | None:
    """The largest number of positions of the model, or None if it has no limit.

    A rotary embedding that changes with the longest request of the batch ("longrope", "dynamic")
    would make a request's tokens depend on the batch. Such a model is limited to the positions that
    it was first trained on, where the embedding does not change.
    """
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        return original or limit
    return limit


def _refuse_unservable(config: PretrainedConfig) -> None:
    _refuse_unpageable(config)
    if reads_images(config):
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        raise UnsupportedModel(_unsupported(config, "it is not a causal language model"), "model")


def _refuse_unpageable(config: PretrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModel(_unsupported(config, "it is an encoder-decoder"), "model")


def require_safetensors(model: str) -> None:
    """Raises unless a local folder holds weights in safetensors form.

    Raises:
        InvalidConfig: The folder holds no safetensors file.
    """
    folder = Path(model)
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        raise InvalidConfig(
            f"{model} holds no .safetensors file; Rayfin loads no pickled weights", "model"
        )


def _require_all_weights(model: str, report: dict[str, Any]) -> None:
    # transformers initializes missing weights at random, and the model would produce nonsense.
    if missing := sorted(report["missing_keys"]):
        raise InvalidConfig(
            f"{model} lacks {len(missing)} weights, {missing[0]} among them", "model"
        )
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise InvalidConfig(
            f"{model} holds {name} of shape {list(stored)}, its config wants {list(expected)}",
            "model",
        )


def _unsupported(config: PretrainedConfig, why: str) -> str:
    names = ", ".join(config.architectures or [type(config).__name__])
    return f"{names} cannot be served: {why}"


def why_not_loaded(model: str, error: Exception) -> str:
    """One line that says why the model could not be loaded."""
    path = Path(model)
    if not path.exists() and (path.is_absolute() or model.startswith((".", "~"))):
        return f"there is no folder {model}"
    if path.is_dir() and not (path / "config.json").exists():
        return f"{model} holds no config.json"
    first_line = next((line for line in str(error).splitlines() if line.strip()), "unknown error")
    return f"cannot load {model!r}: {first_line.strip()}"


PAGE_TYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def page_type(
    name: KVCacheDtype, model_dtype: torch.dtype, attention: PagedAttention
) -> torch.dtype:
    """The dtype of the KV cache's pages: the model's, unless ``name`` is another one.

    Raises:
        InvalidConfig: The attention backend does not read such pages.
    """
    if name == "auto":
        return model_dtype
    readable = page_types(attention)
    if PAGE_TYPES[name] not in readable:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in readable)
        raise InvalidConfig(
            f"kv_cache_dtype {name!r} is not for this device and attention backend, "
            f"whose pages are {names}",
            "kv_cache_dtype",
        )
    return PAGE_TYPES[name]

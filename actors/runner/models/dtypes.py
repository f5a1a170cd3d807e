"""The dtypes of weights and of the KV cache's pages."""

import logging
from typing import TYPE_CHECKING

import torch

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.settings.choices import KVCacheDtype
from rayfin.kernels.attention.select import page_types
from rayfin.kernels.shapes import PagedAttention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
PAGE_TYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def resolve_dtype(
    args: EngineArgs, config: "PretrainedConfig", device: torch.device
) -> torch.dtype:
    """The model's dtype. ``auto`` is the checkpoint's dtype on a GPU and float32 on a CPU.

    float32 is exact for a checkpoint of 16 bits, and torch's 16-bit matrix products on an AVX2 CPU
    are several times slower than its float32 ones. float16 is float32 there too, which holds all
    of its numbers.
    """
    if args.dtype == "float16" and device.type == "cpu":
        logger.warning("dtype float16 is computed in float32 on a CPU, which is faster")
        return torch.float32
    if args.dtype != "auto":
        return DTYPES[args.dtype]
    if device.type == "cpu":
        return torch.float32
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16


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

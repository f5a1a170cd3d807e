"""Of what type the pages of the KV cache are."""

import torch

from rayfin.actors.config import KVCacheDtype
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.weights import DTYPES
from rayfin.kernels.attention.interface import PagedAttention
from rayfin.kernels.attention.select import page_types

PAGE_TYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def page_type(
    asked: KVCacheDtype, model_dtype: torch.dtype, attention: PagedAttention
) -> torch.dtype:
    """The pages' type: the model's, unless another is asked for.

    Raises:
        InvalidConfig: the attention does not read such pages.
    """
    if asked == "auto":
        return model_dtype
    readable = page_types(attention)
    if PAGE_TYPES[asked] not in readable:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in readable)
        raise InvalidConfig(
            f"kv_cache_dtype {asked!r} is not for this device and attention backend, "
            f"whose pages are {names}",
            "kv_cache_dtype",
        )
    return PAGE_TYPES[asked]

"""Writes a step's keys and values to their pages."""

from collections.abc import Callable

import torch

WriteKV = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`write_kv`, or a backend's own."""

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes each token's key and value to its slot, in place, with a single copy.

    Args:
        key: [T, Hkv, Dk].
        value: [T, Hkv, Dv].
        k_pages: [num_pages, page_size, Hkv, Dk], written in place; other slots do not change. fp8
            pages (e4m3) get the nearest number.
        v_pages: [num_pages, page_size, Hkv, Dv], written in place.
        slots: [T] int64, page_id * page_size + offset. Padding tokens may share one slot,
            which gets any one of them.
    """
    for pages, tokens in ((k_pages, key), (v_pages, value)):
        flat = pages.view(-1, *pages.shape[2:])  # [num_pages * page_size, Hkv, D], never a copy
        if pages.dtype == FP8:  # torch may not saturate it, and does not copy it by index
            rounded = tokens.clamp(-FP8_MAX, FP8_MAX).to(FP8)
            flat.view(torch.uint8).index_copy_(0, slots, rounded.view(torch.uint8))
        else:
            flat.index_copy_(0, slots, tokens.to(pages.dtype))

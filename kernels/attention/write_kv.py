"""Storing a step's keys and values in their pages."""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Put each token's key and value straight into its slot, in place: no split, no second copy.

    Args:
        key: [T, Hkv, Dk].
        value: [T, Hkv, Dv].
        k_pages: [num_pages, page_size, Hkv, Dk], written in place; slots that are not named keep
            what they hold. Into fp8 pages (e4m3) goes the nearest number that they have.
        v_pages: [num_pages, page_size, Hkv, Dv], written in place.
        slots: [T] int64, page_id * page_size + offset. Padding tokens may share one slot, whose
            content is then any one of theirs.
    """
    for pages, tokens in ((k_pages, key), (v_pages, value)):
        flat = pages.view(-1, *pages.shape[2:])  # [num_pages * page_size, Hkv, D], never a copy
        if pages.dtype == FP8:  # torch may not saturate it, and does not copy it by index
            rounded = tokens.clamp(-FP8_MAX, FP8_MAX).to(FP8)
            flat.view(torch.uint8).index_copy_(0, slots, rounded.view(torch.uint8))
        else:
            flat.index_copy_(0, slots, tokens.to(pages.dtype))

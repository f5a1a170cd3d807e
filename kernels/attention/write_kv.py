"""Storing a step's keys and values in their pages."""

import torch


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
            what they hold.
        v_pages: [num_pages, page_size, Hkv, Dv], written in place.
        slots: [T] int64, page_id * page_size + offset. Padding tokens may share one slot, whose
            content is then any one of theirs.
    """
    for pages, tokens in ((k_pages, key), (v_pages, value)):
        flat = pages.view(-1, *pages.shape[2:])  # [num_pages * page_size, Hkv, D], never a copy
        flat.index_copy_(0, slots, tokens.to(pages.dtype))

"""Attention of tokens that each see a list of positions of their request, and no others.

Source: the sparse attention of DeepSeek-V3.2 (DeepSeek-AI, 2025), whose layers choose keys by an
index. Only the keys and values of the chosen positions are read.
"""

import torch

from rayfin.kernels.attention.write_kv import FP8
from rayfin.kernels.shapes import PagedBatch

FLOATS_AT_ONCE = 1 << 24
"""Keys and values that are gathered at once, in numbers."""


def attend_chosen(
    query: torch.Tensor,  # [T, H, Dk]
    k_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dk]
    v_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dv]
    batch: PagedBatch,
    chosen: torch.Tensor,  # [T, C] int, positions in the token's request, each once
    *,
    scale: float,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """[T, H, Dv] in the dtype of ``query``, computed in float32.

    A token does not see positions behind its own; its row's keys and values are in their slots.
    """
    tokens, heads, key_dim = query.shape
    kv_heads, value_dim = v_pages.shape[2], v_pages.shape[3]
    groups = heads // kv_heads
    seen = (chosen >= 0) & (chosen <= batch.positions[:, None])
    slots = slots_of(batch, rows_of_tokens(batch), torch.where(seen, chosen, 0))
    width = chosen.shape[1] * kv_heads * (key_dim + value_dim)
    out = query.new_empty(tokens, heads, value_dim)
    at_once = max(FLOATS_AT_ONCE // width, 1)
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        q = query[part].float().view(-1, kv_heads, groups, key_dim) * scale
        k, v = (read_slots(pages, slots[part]) for pages in (k_pages, v_pages))
        scores = torch.einsum("nhgd,nchd->nhgc", q, k)
        scores = scores.masked_fill(~seen[part, None, None], float("-inf"))
        if sinks is not None:
            own = sinks.float().view(1, kv_heads, groups, 1).expand(len(q), -1, -1, 1)
            scores = torch.cat([scores, own], dim=-1)
        shares = scores.softmax(-1)[..., : chosen.shape[1]]
        # A slot that is not seen may hold anything, and nothing times NaN is NaN.
        v = v.masked_fill(~seen[part, :, None, None], 0.0)
        out[part] = torch.einsum("nhgc,nchd->nhgd", shares, v).flatten(1, 2).to(query.dtype)
    return out


def read_slots(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Slots [N, C] of pages [num_pages, page_size, Hkv, D], in fp32: [N, C, Hkv, D]."""
    flat = pages.view(-1, *pages.shape[2:])
    if pages.dtype == FP8:  # torch may not read it by index
        return flat.view(torch.uint8)[slots].view(FP8).float()
    return flat[slots].float()


def rows_of_tokens(batch: PagedBatch) -> torch.Tensor:
    """The row [T] int64 of each token."""
    lengths = batch.query_start.diff().long()
    rows = torch.arange(len(lengths), device=lengths.device)
    return rows.repeat_interleave(lengths, output_size=len(batch.positions))


def slots_of(
    batch: PagedBatch,
    rows: torch.Tensor,  # [N]
    positions: torch.Tensor,  # [N, C]
) -> torch.Tensor:
    """The slots [N, C] int64 of positions of rows."""
    positions = positions.long()
    pages = batch.page_tables[rows].gather(1, positions // batch.page_size).long()
    return pages * batch.page_size + positions % batch.page_size

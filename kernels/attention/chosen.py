"""Attention of tokens that each see a list of positions of their request, and no others.

Source: the sparse attention of DeepSeek-V3.2 (DeepSeek-AI, 2025), whose layers choose keys by an
index. Only the keys and values of the chosen positions are read.
"""

from itertools import product

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
    tokens: torch.Tensor,  # [T] int64, which of the batch's tokens
    scale: float,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """[T, H, Dv] in the dtype of ``query``, computed in float32.

    A token does not see positions behind its own; its row's keys and values are in their slots.
    """
    _, heads, key_dim = query.shape
    kv_heads, value_dim = v_pages.shape[2], v_pages.shape[3]
    groups = heads // kv_heads
    seen = (chosen >= 0) & (chosen <= batch.positions[tokens, None])
    slots = slots_of(batch, rows_of_tokens(batch)[tokens], torch.where(seen, chosen, 0))
    out = query.new_empty(len(query), heads, value_dim)
    width = chosen.shape[1] * (key_dim + value_dim)
    some = min(max(FLOATS_AT_ONCE // width, 1), kv_heads)
    at_once = max(FLOATS_AT_ONCE // (width * some), 1)
    for first, head in product(range(0, len(query), at_once), range(0, kv_heads, some)):
        part, span = slice(first, first + at_once), slice(head, head + some)
        q = query.view(len(query), kv_heads, groups, key_dim)[part, span].float() * scale
        k, v = (read_slots(pages[:, :, span], slots[part]) for pages in (k_pages, v_pages))
        scores = torch.einsum("nhgd,nchd->nhgc", q, k)
        scores = scores.masked_fill(~seen[part, None, None], float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, groups, 1)[:, span].expand(len(q), -1, -1, 1)
            scores = torch.cat([scores, sink], dim=-1)
        shares = scores.softmax(-1)[..., : chosen.shape[1]]
        # A slot that is not seen may hold anything, and nothing times NaN is NaN.
        v = v.masked_fill(~seen[part, :, None, None], 0.0)
        result = torch.einsum("nhgc,nchd->nhgd", shares, v).to(query.dtype)
        out.view(len(query), kv_heads, groups, value_dim)[part, span] = result
    return out


def read_slots(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Slots [N, C] of pages [num_pages, page_size, Hkv, D], in fp32: [N, C, Hkv, D]."""
    page, offset = slots // pages.shape[1], slots % pages.shape[1]
    if pages.dtype == FP8:  # torch may not read it by index
        return pages.view(torch.uint8)[page, offset].view(FP8).float()
    return pages[page, offset].float()


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
    pages = batch.page_tables[rows[:, None], positions // batch.page_size].long()
    return pages * batch.page_size + positions % batch.page_size

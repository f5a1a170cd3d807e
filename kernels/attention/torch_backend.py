"""Paged attention in plain torch operations, for every device.

Keys and values are gathered token by token from their pages (`index_select`, one memory copy per
token), then passed to torch's fused attention. Two things keep the gather correct and small:

* a slot past a row's last token is replaced by the row's last token, so padding never reads memory
  that another request left behind: a masked NaN would still poison a softmax;
* grouped heads are a separate dimension, broadcast over the keys by stride 0 instead of repeated.

The first layer computes what depends on the step alone (slots, masks) and caches it in
`batch.scratch` for the others.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

from rayfin.kernels.shapes import HostInts, PagedBatch

GATHER_TOKENS = 1 << 16  # keys gathered at once by decode rows: bounds the extra memory
SPLIT_LENGTH = 512  # longer rows are not grouped with rows of less than half their length
QUERY_BLOCK = 512  # queries of one row attended at once: bounds the mask, skips unseen keys


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of similar length, attended in one call."""

    rows: torch.Tensor | None  # [N] int64, row indices; None = all decode rows in order
    slots: torch.Tensor  # [N, L] int64, slots of each row's keys, padded to the longest
    mask: torch.Tensor | None  # [N, 1, 1, 1, L] bool, True = visible; None = all are


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Consecutive queries of one prefill row, and the gathered keys that they see."""

    start: int  # first query, index in T
    end: int  # past the last query
    first_key: int  # index in the row's gathered keys
    end_key: int
    causal: bool  # the block is square and starts at its first key: no mask needed
    mask: torch.Tensor | None  # [end - start, end_key - first_key] bool, True = visible


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    slots: torch.Tensor  # [M] int64, the keys that any query of the chunk sees
    blocks: list[_QueryBlock]


def paged_attention(
    query: torch.Tensor,  # [T, H, Dk]
    k_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dk]
    v_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dv]
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Implements `PagedAttention`: decode rows in groups, prefill rows one by one."""
    tokens, heads, key_dim = query.shape
    kv_heads, value_dim = v_pages.shape[2:]
    grouped = query.view(tokens, kv_heads, heads // kv_heads, key_dim)  # [T, Hkv, G, Dk]
    out = query.new_empty(tokens, kv_heads, heads // kv_heads, value_dim)
    if sinks is not None:
        sinks = sinks.float().view(kv_heads, heads // kv_heads, 1, 1)

    for group in _decode_groups(batch, window):
        chosen = slice(0, batch.decoding) if group.rows is None else group.rows
        q = grouped[chosen].unsqueeze(3)  # [N, Hkv, G, 1, Dk]
        k = _gather(k_pages, group.slots, query.dtype).transpose(1, 2)  # [N, Hkv, L, Dk]
        v = _gather(v_pages, group.slots, query.dtype).transpose(1, 2)  # [N, Hkv, L, Dv]
        out[chosen] = _attend(q, k, v, scale, group.mask, False, softcap, sinks).squeeze(3)

    for row in _prefill_rows(batch, window):
        k = _gather(k_pages, row.slots, query.dtype).transpose(0, 1)  # [Hkv, M, Dk]
        v = _gather(v_pages, row.slots, query.dtype).transpose(0, 1)  # [Hkv, M, Dv]
        for block in row.blocks:
            q = grouped[block.start : block.end].permute(1, 2, 0, 3)  # [Hkv, G, n, Dk]
            keys = slice(block.first_key, block.end_key)
            attended = _attend(
                q, k[:, keys], v[:, keys], scale, block.mask, block.causal, softcap, sinks
            )  # [Hkv, G, n, Dv]
            out[block.start : block.end] = attended.permute(2, 0, 1, 3)
    return out.flatten(1, 2)  # [T, H, Dv]


def _gather(pages: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[num_pages, page_size, Hkv, D], [...] int64 -> [..., Hkv, D] of `dtype`."""
    flat = pages.view(pages.shape[0] * pages.shape[1], -1)
    chosen = flat.index_select(0, slots.flatten()).to(dtype)
    return chosen.view(*slots.shape, *pages.shape[2:])


def _attend(
    q: torch.Tensor,  # [..., Hkv, G, n, Dk]
    k: torch.Tensor,  # [..., Hkv, M, Dk]
    v: torch.Tensor,  # [..., Hkv, M, Dv]
    scale: float,
    mask: torch.Tensor | None,  # bool, broadcasts to [..., Hkv, G, n, M]; True = visible
    causal: bool,  # query i sees keys 0 .. i; then n == M and mask is None
    softcap: float | None,
    sinks: torch.Tensor | None,  # [Hkv, G, 1, 1] fp32
) -> torch.Tensor:  # [..., Hkv, G, n, Dv]
    """Attention of grouped heads, with fp32 softmax for any dtype."""
    if softcap is None and sinks is None and q.shape[-1] == v.shape[-1]:
        if q.dim() == 5:  # decoding, n = 1: the group takes the place of the queries
            flat_mask = None if mask is None else mask.squeeze(3)
            return F.scaled_dot_product_attention(
                q.squeeze(3), k, v, attn_mask=flat_mask, scale=scale
            ).unsqueeze(3)
        group = q.shape[1]
        k = k.unsqueeze(1).expand(-1, group, -1, -1)  # stride 0 over the group: no copy
        v = v.unsqueeze(1).expand(-1, group, -1, -1)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale
        )

    scores = q.float() @ k.float().unsqueeze(-3).transpose(-1, -2) * scale  # [..., Hkv, G, n, M]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[-2]]
    return (weights @ v.float().unsqueeze(-3)).to(q.dtype)


def _decode_groups(batch: PagedBatch, window: int | None) -> list[_DecodeGroup]:
    """The decode rows in groups of similar length, computed once per step and window."""
    key = ("torch", "decode", window)
    if key not in batch.scratch:
        lengths = [int(n) for n in batch.kv_len_cpu[: batch.decoding]]
        if window is not None:
            lengths = [min(n, window) for n in lengths]
        batch.scratch[key] = [
            _decode_group(batch, rows, max(lengths[r] for r in rows), min(lengths[r] for r in rows))
            for rows in _split_by_length(lengths)
        ]
    groups: list[_DecodeGroup] = batch.scratch[key]
    return groups


def _split_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups rows so that padding to the longest wastes little and memory stays bounded.

    A group ends where a row is shorter than half of a long group's longest, or where the group
    would gather more than GATHER_TOKENS keys. Rows of one group keep their order.
    """
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        apart = longest >= SPLIT_LENGTH and lengths[row] * 2 < longest
        if not groups or apart or (len(groups[-1]) + 1) * longest > GATHER_TOKENS:
            groups.append([])
            longest = lengths[row]
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _decode_group(batch: PagedBatch, rows: list[int], longest: int, shortest: int) -> _DecodeGroup:
    """Slots and mask of decode rows that see `shortest` .. `longest` keys."""
    device = batch.kv_len.device
    every = len(rows) == batch.decoding
    index = None if every else torch.tensor(rows, device=device)
    chosen = slice(0, batch.decoding) if index is None else index
    end = batch.kv_len[chosen].long().unsqueeze(1)  # [N, 1]
    first = (end - longest).clamp(min=0)  # a window never reaches below it: longest <= window
    keys = first + torch.arange(longest, device=device)  # [N, L] positions
    inside = torch.minimum(keys, end - 1).clamp(min=0)
    tables = batch.page_tables[chosen]
    pages = tables.gather(1, inside // batch.page_size).long()
    slots = pages * batch.page_size + inside % batch.page_size
    mask = None
    if shortest != longest:
        mask = (keys < end).view(len(rows), 1, 1, 1, longest)
    return _DecodeGroup(index, slots, mask)


def _prefill_rows(batch: PagedBatch, window: int | None) -> list[_PrefillRow]:
    """The prefill rows' slots and query blocks, computed once per step and window."""
    key = ("torch", "prefill", window)
    if key not in batch.scratch:
        starts: HostInts = batch.query_start_cpu
        batch.scratch[key] = [
            _prefill_row(
                batch,
                row,
                int(starts[row]),
                int(starts[row + 1]),
                int(batch.kv_len_cpu[row]),
                window,
            )
            for row in range(batch.decoding, batch.rows)
            if starts[row + 1] > starts[row]
        ]
    rows: list[_PrefillRow] = batch.scratch[key]
    return rows


def _prefill_row(
    batch: PagedBatch, row: int, start: int, end: int, kv_len: int, window: int | None
) -> _PrefillRow:
    """One row's queries start .. end (in T) against its kv_len keys, in blocks of QUERY_BLOCK."""
    device = batch.kv_len.device
    cached = kv_len - (end - start)  # position of the chunk's first token
    lowest = 0 if window is None else max(0, cached - window + 1)  # first key any query sees
    keys = torch.arange(lowest, kv_len, device=device)
    pages = batch.page_tables[row].index_select(0, keys // batch.page_size).long()
    slots = pages * batch.page_size + keys % batch.page_size

    sees_to = np.arange(cached, kv_len) if batch.sees_to is None else batch.sees_to[start:end]
    blocks = []
    for begin in range(start, end, QUERY_BLOCK):
        stop = min(begin + QUERY_BLOCK, end)
        first_query = cached + begin - start  # positions in the request
        last_query = cached + stop - start - 1
        last_key = int(sees_to[stop - start - 1])
        first_key = lowest if window is None else max(lowest, first_query - window + 1)
        causal = first_query == first_key and (window is None or last_query - first_key < window)
        causal = causal and batch.sees_to is None
        single = stop - begin == 1  # sees all of first_key .. last_key
        mask = None
        if not causal and not single:
            p = torch.arange(first_query, last_query + 1, device=device).unsqueeze(1)
            k = torch.arange(first_key, last_key + 1, device=device)
            seen = torch.from_numpy(sees_to[begin - start : stop - start]).to(device)
            mask = k <= seen.unsqueeze(1)
            if window is not None:
                mask &= k > p - window
        span = slice(first_key - lowest, last_key + 1 - lowest)
        blocks.append(_QueryBlock(begin, stop, span.start, span.stop, causal, mask))
    return _PrefillRow(slots, blocks)


def segment_attention(
    query: torch.Tensor,  # [T, H, D]
    key: torch.Tensor,  # [T, H, D]
    value: torch.Tensor,  # [T, H, D]
    starts: npt.NDArray[np.int32],  # [S + 1] int: where each segment begins, and T
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Returns [T, H, D]: each token attends to all of its own segment.

    With a ``window``, token i attends to j where \\|i - j\\| < window. Segments of one length are
    computed together; a segment's bits depend on nothing but itself.
    """
    out = torch.empty_like(query)
    by_length: dict[int, list[int]] = defaultdict(list)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        by_length[end - start].append(start)
    for length, begins in by_length.items():
        offsets = torch.arange(length, device=query.device)
        places = torch.tensor(begins, device=query.device)[:, None] + offsets  # [N, L]
        q, k, v = (tensor[places].transpose(1, 2) for tensor in (query, key, value))  # [N, H, L, D]
        mask = None
        if window is not None and length > window:
            mask = (offsets[:, None] - offsets).abs() < window
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out[places] = attended.transpose(1, 2)
    return out

"""Attention within chunks equals that under a mask of blocks."""

import numpy as np
import torch

from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.shapes import PagedBatch, within_chunks

PAGE, SIZE, HEADS, DIM = 2, 6, 2, 4


def _batch(rows: list[tuple[int, int]]) -> PagedBatch:
    """Rows of (tokens before, new tokens), each on pages of its own."""
    lengths = np.array([new for _, new in rows])
    ends = np.array([sum(row) for row in rows], np.int32)
    widest = -(-int(ends.max()) // PAGE)
    pages = torch.arange(len(rows) * widest, dtype=torch.int32).view(len(rows), widest).flip(1)
    positions = np.concatenate([np.arange(before, before + new) for before, new in rows])
    row = np.repeat(np.arange(len(rows)), lengths)
    held = pages.numpy()[row, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    starts = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return PagedBatch(
        query_start=torch.from_numpy(starts),
        kv_len=torch.from_numpy(ends),
        page_tables=pages,
        slots=torch.from_numpy(held),
        positions=torch.from_numpy(positions),
        query_start_cpu=starts,
        kv_len_cpu=ends,
        decoding=sum(new == 1 for _, new in rows),
        page_size=PAGE,
    )


def test_equals_a_mask_of_blocks() -> None:
    torch.manual_seed(0)
    rows = [(0, 1), (5, 1), (6, 1), (17, 1), (0, 15), (4, 9), (11, 2)]
    batch = _batch(rows)
    tokens = int(batch.query_start_cpu[-1])
    pages = batch.page_tables.numel()
    keys, values = torch.randn(2, pages, PAGE, HEADS, DIM)
    query = torch.randn(tokens, HEADS, DIM)
    cut = within_chunks(batch, SIZE)
    assert within_chunks(batch, SIZE) is cut and cut.decoding == batch.decoding
    actual = paged_attention(query, keys, values, cut, scale=0.5)
    at = 0
    for row, (before, new) in enumerate(rows):
        context = [keys[batch.page_tables[row]].flatten(0, 1), values[batch.page_tables[row]]]
        k, v = context[0], context[1].flatten(0, 1)
        for position in range(before, before + new):
            seen = slice(position // SIZE * SIZE, position + 1)
            scores = torch.einsum("hd,khd->hk", query[at], k[seen]) * 0.5
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])
            torch.testing.assert_close(actual[at], expected)
            at += 1

"""Attention within chunks of the context (Llama 4): a window whose start is rounded down.

A query at position p sees the keys from ``p // size * size`` on. No kernel needs to know: a chunk
of the context counts as a request, whose pages are some of the row's and whose positions start at
the chunk. A row whose tokens lie in several chunks becomes several rows.
"""

import numpy as np
import torch

from rayfin.kernels.shapes import PagedBatch


def within_chunks(batch: PagedBatch, size: int) -> PagedBatch:
    """The rows of ``batch``, cut at multiples of ``size`` positions, each from its chunk on.

    ``size`` is a multiple of the page size. Tokens stay where they are in T.
    """
    key = ("within chunks", size)
    if (known := batch.scratch.get(key)) is None:
        batch.scratch[key] = known = _cut(batch, size)
    cut: PagedBatch = known
    return cut


def _cut(batch: PagedBatch, size: int) -> PagedBatch:
    starts = np.asarray(batch.query_start_cpu, np.int64)
    ends = np.asarray(batch.kv_len_cpu, np.int64)
    begins = ends - np.diff(starts)  # position of each row's first token
    counts = (ends - 1) // size - begins // size + 1
    row = np.repeat(np.arange(len(ends)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk_start = (begins[row] // size + within) * size
    first = np.maximum(begins[row], chunk_start)
    last = np.minimum(ends[row], chunk_start + size)
    query_start = np.append(0, np.cumsum(last - first)).astype(np.int32)
    kv_len = (last - chunk_start).astype(np.int32)
    width = batch.page_tables.shape[1]
    pages = chunk_start[:, None] // batch.page_size + np.arange(min(size // batch.page_size, width))
    device = batch.page_tables.device
    columns = torch.from_numpy(np.minimum(pages, width - 1)).to(device)
    token_start = torch.from_numpy(np.repeat(chunk_start, last - first)).to(device)
    return PagedBatch(
        query_start=torch.from_numpy(query_start).to(device),
        kv_len=torch.from_numpy(kv_len).to(device),
        page_tables=batch.page_tables[torch.from_numpy(row).to(device)].gather(1, columns),
        slots=batch.slots,
        positions=batch.positions - token_start,
        query_start_cpu=query_start,
        kv_len_cpu=kv_len,
        decoding=batch.decoding,
        page_size=batch.page_size,
    )

"""The largest step an engine can be asked for, to measure memory with."""

import numpy as np

from rayfin.actors.config import BatchLimits
from rayfin.actors.messages import Int32Array, NewRequest, Sampling, SchedulerInfo


def largest_step(
    limits: BatchLimits, page_size: int, model_len: int
) -> tuple[SchedulerInfo, Int32Array]:
    """Prompts of up to ``model_len`` tokens that fill a step, and how many pages each one takes.

    None is longer than a request may be: a model with learned positions has no others.
    """
    rows = min(limits.max_prefill_batch, limits.max_decoding_batch)
    tokens = min(limits.max_batch_tokens, rows * model_len)
    starts = np.arange(0, tokens, model_len, dtype=np.int32)
    lengths = np.minimum(tokens - starts, model_len).astype(np.int32)
    pages = -(-lengths // page_size)
    ids = np.arange(len(starts), dtype=np.int32)
    info = SchedulerInfo(
        epoch=0,
        step=0,
        ids=ids,
        chunk_idx=starts,
        chunk_len=lengths,
        merge_prompt=np.zeros(tokens, np.int32),
        kv_len=np.zeros_like(ids),
        kv_page_len=pages,
        last_pos=lengths - 1,
        is_decoding=np.zeros(len(ids), np.bool_),
        decoding_batch=0,
        prefill_batch=len(ids),
        new_pages=np.arange(pages.sum(), dtype=np.int32),
        new_pages_len=pages,
        new_requests=[NewRequest(handle, Sampling(), cap=model_len) for handle in ids.tolist()],
    )
    return info, pages

"""The largest step an engine can be asked for, to measure memory with."""

import numpy as np

from rayfin.actors.config import BatchLimits
from rayfin.actors.messages import NewRequest, Sampling, SchedulerInfo


def largest_step(limits: BatchLimits, page_size: int) -> tuple[SchedulerInfo, int]:
    """One prompt of ``max_batch_tokens`` tokens, and how many pages it takes."""
    tokens = limits.max_batch_tokens
    pages = -(-tokens // page_size)

    def one(value: int) -> np.ndarray:
        return np.array([value], np.int32)

    info = SchedulerInfo(
        epoch=0,
        step=0,
        ids=one(0),
        chunk_idx=one(0),
        chunk_len=one(tokens),
        merge_prompt=np.zeros(tokens, np.int32),
        kv_len=one(0),
        kv_page_len=one(pages),
        last_pos=one(tokens - 1),
        is_decoding=np.zeros(1, np.bool_),
        decoding_batch=0,
        prefill_batch=1,
        new_pages=np.arange(pages, dtype=np.int32),
        new_pages_len=one(pages),
        new_requests=[NewRequest(0, Sampling(), tokens + 1)],
    )
    return info, pages

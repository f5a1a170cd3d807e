"""The steps whose time is measured when a runner starts (``actors/step_cost.py``)."""

import numpy as np

from rayfin.actors.messages import SchedulerInfo

ROW_TOKENS = 8


def decode_step(tokens: int, context: int, page_size: int) -> SchedulerInfo:
    """A step of so many tokens, ``ROW_TOKENS`` a row, at the end of one and the same context."""
    rows = -(-tokens // ROW_TOKENS)
    lengths = np.full(rows, min(tokens, ROW_TOKENS, context), np.int32)
    pages = np.full(rows, -(-context // page_size), np.int32)
    ids = np.arange(rows, dtype=np.int32)
    return SchedulerInfo(
        epoch=0,
        step=0,
        ids=ids,
        chunk_idx=(np.cumsum(lengths) - lengths).astype(np.int32),
        chunk_len=lengths,
        merge_prompt=np.zeros(int(lengths.sum()), np.int32),
        kv_len=context - lengths,
        kv_page_len=pages,
        last_pos=lengths - 1,
        is_decoding=np.ones(rows, np.bool_),
        decoding_batch=rows,
        prefill_batch=0,
        new_pages=np.tile(np.arange(pages[0], dtype=np.int32), rows),
        new_pages_len=pages,
    )

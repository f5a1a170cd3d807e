"""Ids of the tokens that embeddings stand for, which depend on the embeddings alone.

As with images, each row gets an id below VIRTUAL_TOKENS, so whatever compares prompts (the prefix
index, forks, the router, the quarantine) needs no further key. The ids of BLOCK rows are drawn from
one digest of them all, so that to meet the ids of a page takes all bits of its ids at once, not
those of one row after another. Prompts that begin with the same blocks share their pages.
"""

import hashlib

import numpy as np

from rayfin.actors.media.virtual_ids import virtual_ids
from rayfin.actors.messages import Int32Array

BLOCK = 16
SHORTEST = 8  # rows of the last block; fewer join the one before it


def row_ids(rows: np.ndarray, dtype: str) -> Int32Array:
    """The ids [N] of the ``rows`` [N, hidden], which are in memory one after another."""
    starts = list(range(0, len(rows), BLOCK))
    if len(starts) > 1 and len(rows) - starts[-1] < SHORTEST:
        starts.pop()
    blocks = zip(starts, [*starts[1:], len(rows)], strict=True)
    ids = [virtual_ids(_digest(rows[start:end], dtype), end - start) for start, end in blocks]
    return np.concatenate(ids) if ids else np.zeros(0, np.int32)


def _digest(rows: np.ndarray, dtype: str) -> bytes:
    """SHA-256 of rows; no image has the same one."""
    name = f"prompt_embeds {dtype} {rows.shape}\0"
    return hashlib.sha256(name.encode() + rows.tobytes()).digest()

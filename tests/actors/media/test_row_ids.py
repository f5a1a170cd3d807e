"""Ids of embeddings: the same for the same rows, and no part of them for others."""

import numpy as np

from rayfin.actors.media.part import VIRTUAL_TOKENS
from rayfin.actors.media.virtual_ids import BLOCK, SHORTEST, row_ids


def _rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 8)).astype(np.float32)


def test_ids_are_of_the_rows_alone() -> None:
    ids = row_ids(_rows(40), "float32")
    assert ids.dtype == np.int32 and len(ids) == 40 and (ids < VIRTUAL_TOKENS).all()
    assert (ids == row_ids(_rows(40), "float32")).all()
    assert len(set(ids.tolist())) == 40


def test_prompts_share_the_blocks_that_they_begin_with() -> None:
    rows = _rows(48)
    other = rows.copy()
    other[20] += 1
    ids, others = row_ids(rows, "float32"), row_ids(other, "float32")
    assert (ids[:BLOCK] == others[:BLOCK]).all() and (ids[2 * BLOCK :] == others[2 * BLOCK :]).all()
    assert not (ids[BLOCK : 2 * BLOCK] == others[BLOCK : 2 * BLOCK]).any(), "a row decides alone"


def test_a_short_rest_joins_the_block_before() -> None:
    """A page of few ids would be met by chance, or on purpose."""
    whole = row_ids(_rows(2 * BLOCK), "float32")
    joined = row_ids(_rows(2 * BLOCK + SHORTEST - 1), "float32")
    apart = row_ids(_rows(2 * BLOCK + SHORTEST), "float32")
    assert (joined[:BLOCK] == whole[:BLOCK]).all()
    assert not (joined[BLOCK : 2 * BLOCK] == whole[BLOCK:]).any()
    assert (apart[: 2 * BLOCK] == whole).all()


def test_types_and_shapes_count() -> None:
    bits = np.arange(64, dtype=np.uint16).reshape(8, 8)
    assert (row_ids(bits, "bfloat16") != row_ids(bits.view(np.float16), "float16")).all()
    assert (row_ids(bits.reshape(4, 16), "bfloat16")[:4] != row_ids(bits, "bfloat16")[:4]).all()

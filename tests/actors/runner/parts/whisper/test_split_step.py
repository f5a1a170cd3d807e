"""A step's tokens apart: those of clips, those of transcripts, and what these attend to."""

import numpy as np
import torch

from rayfin.actors.runner.parts.whisper.split_step import split_step
from rayfin.kernels.shapes import PagedBatch

PAGE, CLIP, STATES = 4, 8, 7


def _batch(rows: list[tuple[int, int]], decoding: int) -> PagedBatch:
    """Rows of (tokens in the cache, tokens of the chunk); page p of row r is 10 r + p."""
    counts = np.array([count for _, count in rows])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ends = np.array([cached + count for cached, count in rows], np.int32)
    positions = np.concatenate([np.arange(cached, cached + count) for cached, count in rows])
    tables = 10 * np.arange(len(rows))[:, None] + np.arange(-(-ends.max() // PAGE))
    row = np.repeat(np.arange(len(rows)), counts)
    return PagedBatch(
        query_start=torch.from_numpy(starts),
        kv_len=torch.from_numpy(ends),
        page_tables=torch.from_numpy(tables.astype(np.int32)),
        slots=torch.from_numpy(PAGE * tables[row, positions // PAGE] + positions % PAGE),
        positions=torch.from_numpy(positions),
        query_start_cpu=starts,
        kv_len_cpu=ends,
        decoding=decoding,
        page_size=PAGE,
    )


def test_a_mixed_step() -> None:
    """A row that decodes, one inside its clip, one across its end, one behind it."""
    step = split_step(_batch([(11, 1), (2, 3), (6, 4), (9, 3)], decoding=1), CLIP, STATES)
    assert step.clips.tolist() == [1, 2, 3, 4, 5]
    assert step.tokens.tolist() == [0, 6, 7, 8, 9, 10]
    text, across = step.text, step.across
    assert text is not None and across is not None
    assert text.query_start_cpu.tolist() == text.query_start.tolist() == [0, 1, 3, 6]
    assert text.kv_len_cpu.tolist() == text.kv_len.tolist() == [4, 2, 4]
    assert text.positions.tolist() == [3, 0, 1, 1, 2, 3] and text.decoding == 1
    assert text.page_tables.tolist() == [[2], [22], [32]]
    assert text.slots.tolist() == [11, 88, 89, 129, 130, 131]
    assert across.page_tables.tolist() == [[0, 1], [20, 21], [20, 21], *[[30, 31]] * 3]
    assert across.kv_len.tolist() == [STATES] * 6 == across.kv_len_cpu.tolist()
    assert across.decoding == across.rows == 6
    assert step.rows_of(torch.tensor([0, 7, 10])).tolist() == [0, 2, 5]


def test_a_step_of_clips_alone() -> None:
    step = split_step(_batch([(0, 8), (0, 3)], decoding=0), CLIP, STATES)
    assert step.text is None and step.across is None and len(step.clips) == 11


def test_a_step_that_only_decodes() -> None:
    step = split_step(_batch([(8, 1), (15, 1)], decoding=2), CLIP, STATES)
    assert len(step.clips) == 0 and step.tokens.tolist() == [0, 1]
    assert step.text is not None and step.text.decoding == 2
    assert step.text.kv_len_cpu.tolist() == [1, 8]

"""A step of a model whose prompts begin with a clip: tokens of clips and of transcripts apart."""

from dataclasses import dataclass

import numpy as np
import torch

from rayfin.actors.messages import Int64Array
from rayfin.kernels.shapes import PagedBatch, to_device


@dataclass(frozen=True, slots=True)
class SplitStep:
    """T tokens of a step: C of clips, D of transcripts. Both kinds of pages are in one table."""

    clips: torch.Tensor  # [C] int64, in T
    tokens: torch.Tensor  # [D] int64, in T, rising
    text: PagedBatch | None  # the D tokens over pages behind those of clips; None: D is 0
    across: PagedBatch | None  # each of the D tokens as a row over the pages of its clip
    rows: Int64Array  # [R'] which rows of the step those of ``text`` are

    def rows_of(self, sampled: torch.Tensor) -> torch.Tensor:
        """Where in D the tokens at ``sampled`` [S] of T are."""
        return torch.searchsorted(self.tokens, sampled).clamp(max=max(len(self.tokens) - 1, 0))


def split_step(batch: PagedBatch, clip_tokens: int, states: int) -> SplitStep:
    """Takes a step apart.

    Args:
        clip_tokens: in front of each prompt: whole pages.
        states: of the encoder, in the first of those.
    """
    device = batch.positions.device
    starts = np.asarray(batch.query_start_cpu, np.int64)
    counts, ends = np.diff(starts), np.asarray(batch.kv_len_cpu, np.int64)
    own_ends = ends - clip_tokens
    own_counts = np.clip(np.minimum(counts, own_ends), 0, None)  # they end their row's chunk
    offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    is_own = offsets >= np.repeat(counts - own_counts, counts)
    clips = to_device(np.flatnonzero(~is_own), device)
    tokens = to_device(np.flatnonzero(is_own), device)
    rows = np.flatnonzero(own_counts)
    if len(rows) == 0:
        return SplitStep(clips, tokens, None, None, rows)
    pages = clip_tokens // batch.page_size
    query_start = np.concatenate([[0], np.cumsum(own_counts[rows])]).astype(np.int32)
    kv_len = own_ends[rows].astype(np.int32)
    tables = batch.page_tables[to_device(rows, device)]
    text = PagedBatch(
        query_start=to_device(query_start, device),
        kv_len=to_device(kv_len, device),
        page_tables=tables[:, pages:].contiguous(),
        slots=batch.slots[tokens],
        positions=batch.positions[tokens] - clip_tokens,
        query_start_cpu=query_start,
        kv_len_cpu=kv_len,
        decoding=int((rows < batch.decoding).sum()),
        page_size=batch.page_size,
    )
    count = int(query_start[-1])
    row_of_token = to_device(np.repeat(np.arange(len(rows)), own_counts[rows]), device)
    starts_across = np.arange(count + 1, dtype=np.int32)
    seen = np.full(count, states, np.int32)
    across = PagedBatch(
        query_start=to_device(starts_across, device),
        kv_len=to_device(seen, device),
        page_tables=tables[:, :pages][row_of_token].contiguous(),
        slots=text.slots,
        positions=torch.full_like(text.positions, states - 1),
        query_start_cpu=starts_across,
        kv_len_cpu=seen,
        decoding=count,
        page_size=batch.page_size,
    )
    return SplitStep(clips, tokens, text, across, rows)

"""Speculative decoding: a proposer guesses tokens, one forward computes them, the sampler decides.

Sampling is a function of (logits, rules, seed, position), so the token of a position is what the
sampler draws there; a draft only says which positions are computed at once. Draws are kept up to
and with the first that differs from its draft. Output equals that without drafts by construction
(cf. Leviathan et al., 2023, whose rejection rule this replaces).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from rayfin.actors.messages import (
    DRAFT,
    NO_TOKEN,
    SAMPLED_LAST_STEP,
    Int32Array,
    Int64Array,
    NewRequest,
    SchedulerInfo,
)
from rayfin.actors.runner.sampling.sampler import Sampled, Sampler
from rayfin.actors.runner.step.batch import sampled_rows
from rayfin.actors.runner.step.request_slots import RequestSlots


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for N slots."""

    tokens: Int32Array  # [N, K]
    lengths: Int64Array  # [N] how many of the K each slot has, possibly none


class Proposer(Protocol):
    """Guesses how requests go on: n-grams, a draft model, heads of the model."""

    def add(self, slot: int, request: NewRequest) -> None:
        """Starts a request with the tokens of its history."""

    def remove(self, slot: int) -> None:
        """Drops the slot's request."""

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        """Appends sampled tokens to the slot's request."""

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        """Guesses at most ``room`` [N] next tokens of the ``slots`` [N]."""
        ...


class Speculator:
    """Puts drafts into a step, and keeps of its tokens those that are right.

    The scheduler knows counts only, and with steps in flight only the most that they can be: it
    takes drafts for right until a result says otherwise. ``_lengths`` has what is true.
    """

    def __init__(
        self, proposer: Proposer, slots: RequestSlots, sampler: Sampler, device: torch.device
    ) -> None:
        self._proposer = proposer
        self._slots = slots
        self._sampler = sampler
        self._device = device
        self._lengths = np.zeros_like(slots.stops.cap)  # tokens in the cache, by slot

    def apply_diff(self, info: SchedulerInfo) -> None:
        """Drops the step's finished requests and starts its new ones."""
        for slot in info.finished:
            self._proposer.remove(slot)
        for new in info.new_requests:
            assert new.history is not None, "a proposer needs EngineConfig.send_history"
            self._proposer.add(new.handle, new)

    def expand(self, info: SchedulerInfo) -> SchedulerInfo:
        """The step from where its rows really stand, with tokens in the place of DRAFT.

        A row has fewer tokens than granted if the proposer has fewer.
        """
        first = info.merge_prompt[info.chunk_idx]
        sampled_last = (first == SAMPLED_LAST_STEP) & info.is_decoding
        kv_len = np.where(sampled_last, self._lengths[info.ids], info.kv_len).astype(np.int32)
        info = replace(info, kv_len=kv_len)
        if not info.num_drafts:
            return info
        rows = np.flatnonzero(info.is_decoding & (info.chunk_len > 1))
        granted = info.chunk_len[rows].astype(np.int64) - 1
        drafts = self._proposer.propose(info.ids[rows].astype(np.int64), granted)
        assert (drafts.lengths <= granted).all(), "more drafts than granted"
        lengths = info.chunk_len.copy()
        lengths[rows] = 1 + drafts.lengths
        within = np.arange(len(info.merge_prompt)) - np.repeat(info.chunk_idx, info.chunk_len)
        merged = info.merge_prompt[within < np.repeat(lengths, info.chunk_len)]
        columns = np.arange(drafts.tokens.shape[1])
        merged[merged == DRAFT] = drafts.tokens[columns < drafts.lengths[:, None]]
        last_pos = info.last_pos.copy()
        last_pos[rows] = lengths[rows] - 1
        return replace(
            info,
            chunk_idx=(np.cumsum(lengths) - lengths).astype(np.int32),
            chunk_len=lengths,
            merge_prompt=merged,
            last_pos=last_pos,
        )

    @staticmethod
    def without_drafts(info: SchedulerInfo) -> SchedulerInfo:
        """The same step with one token of each decoding row."""
        decoding = info.decoding_batch
        kept = np.ones(len(info.merge_prompt), np.bool_)
        kept[: len(kept) - info.num_prefill_tokens] = False
        kept[info.chunk_idx[:decoding]] = True
        lengths, last_pos = info.chunk_len.copy(), info.last_pos.copy()
        lengths[:decoding], last_pos[:decoding] = 1, 0
        return replace(
            info,
            chunk_idx=(np.cumsum(lengths) - lengths).astype(np.int32),
            chunk_len=lengths,
            merge_prompt=info.merge_prompt[kept],
            last_pos=last_pos,
        )

    def columns(self, info: SchedulerInfo) -> list[tuple[Int64Array, Int64Array]]:
        """(rows [S], indices in T of the tokens that they sample after), a pair for each draft.

        The first pair has all rows that sample; those behind have the rows with that many drafts.
        """
        drafting = info.is_decoding & (info.chunk_len > 1)
        last = np.flatnonzero(info.last_pos >= 0)
        offset = np.where(drafting, 0, info.last_pos)
        pairs = [(last, (info.chunk_idx + offset)[last].astype(np.int64))]
        for column in range(1, int(info.chunk_len[drafting].max(initial=1))):
            rows = np.flatnonzero(drafting & (info.chunk_len > column))
            pairs.append((rows, info.chunk_idx[rows].astype(np.int64) + column))
        return pairs

    def verify(
        self,
        info: SchedulerInfo,
        columns: list[tuple[Int64Array, Int64Array]],
        logits: torch.Tensor,
    ) -> list[Sampled]:
        """Samples column after column the rows whose drafts were right so far.

        Processors see exactly the tokens before each draw. If a draw raises, they are back where
        they were.

        Args:
            logits: [L, V] of all columns one after another, then of scored tokens.
        """
        results: list[Sampled] = []
        scored = sum(len(rows) for rows, _ in columns)
        start, agreed = 0, np.ones(len(info.ids), np.bool_)
        try:
            for column, (rows, index) in enumerate(columns):
                if column:
                    drawn = results[-1].tokens
                    draft = np.full(len(info.ids), NO_TOKEN, np.int32)
                    draft[rows] = info.merge_prompt[index]
                    stopped = self._slots.stops.hits(info.ids, drawn)
                    agreed &= (drawn >= 0) & (drawn == draft) & ~stopped
                kept = agreed[rows]
                if not kept.any():
                    break
                part = logits[start : start + len(rows)]
                start += len(rows)
                if not kept.all():
                    part = part[torch.from_numpy(np.flatnonzero(kept)).to(part.device)]
                if not column:
                    part = torch.cat([part, logits[scored:]]) if scored < len(logits) else part
                results.append(self._sample(info, rows[kept], index[kept], part))
        except Exception:
            for sampled in reversed(results):
                self._sampler.rollback(info, sampled.tokens)
            raise
        return results

    def remember(self, info: SchedulerInfo, results: Sequence[Sampled]) -> None:
        """Keeps what the call gave: where its rows stand, and their tokens for the proposer."""
        tokens = np.stack([sampled.tokens for sampled in results], axis=1)
        counts = np.count_nonzero(tokens >= 0, axis=1)
        grown = np.where(info.is_decoding, counts, info.chunk_len)
        self._lengths[info.ids] = info.kv_len + grown
        for row in np.flatnonzero(counts).tolist():
            self._proposer.accept(int(info.ids[row]), tokens[row, : counts[row]].tolist())

    def _sample(
        self, info: SchedulerInfo, rows: Int64Array, index: Int64Array, logits: torch.Tensor
    ) -> Sampled:
        positions = info.kv_len[rows] + (index - info.chunk_idx[rows]).astype(np.int32) + 1
        at = sampled_rows(info.ids[rows], rows, positions, self._slots, self._device)
        return self._sampler.sample(info, at, logits)

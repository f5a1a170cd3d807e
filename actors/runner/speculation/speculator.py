"""Speculative decoding: a proposer guesses tokens, one forward computes them, the sampler decides.

Sampling is a function of (logits, rules, seed, position), so the token of a position is what the
sampler draws there; a draft only says which positions are computed at once. Draws are kept up to
and with the first that differs from its draft. Output equals that without drafts by construction
(cf. Leviathan et al., 2023, whose rejection rule this replaces).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rayfin.actors.config import BatchLimits
from rayfin.actors.errors import NumericalError
from rayfin.actors.messages import (
    NO_TOKEN,
    SAMPLED_LAST_STEP,
    BoolArray,
    Int32Array,
    Int64Array,
    SchedulerInfo,
)
from rayfin.actors.runner.batch import SampledRows
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import NOT_FINITE, Sampled, Sampler
from rayfin.actors.runner.speculation.interface import Drafts, Proposer
from rayfin.actors.runner.speculation.planner import DraftPlanner
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.actors.speculation import DraftUsage


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the logits of a step with drafts come from and go to: L of them, column by column.

    Column 0 has all rows that sample; column j has the rows with j drafts or more.
    """

    rows: Int64Array  # [L]
    index: Int64Array  # [L] in the step's tokens: the one that is sampled after
    column: Int64Array  # [L]


class Speculator:
    """Puts drafts into a step, and keeps of its tokens those that are right.

    The scheduler knows counts only, and with steps in flight only the most that they can be: it
    takes drafts for right until a result says otherwise. ``_lengths`` has what is true.
    """

    def __init__(
        self,
        proposer: Proposer,
        slots: RequestSlots,
        sampler: Sampler,
        device: torch.device,
        limits: BatchLimits,
        planner: DraftPlanner,
        states: StateTensors | None = None,
    ) -> None:
        self.planner = planner
        self.drafting = 0.0  # seconds that the last ``expand`` took to propose
        self._proposer = proposer
        self._slots = slots
        self._sampler = sampler
        self._device = device
        self._limits = limits
        self._states = states  # of recurrent layers
        self._lengths = np.zeros_like(slots.stops.cap)  # tokens in the cache, by slot
        self._drafted = self._drafts = 0  # since the last ``take_usage``: tokens, and rows
        self._accepted: Int64Array = np.zeros(0, np.int64)  # by place in a draft

    def begin(self, info: SchedulerInfo) -> SchedulerInfo:
        """Applies the step's diff; returns the step from where its rows really stand."""
        for slot in info.finished:
            self._proposer.remove(slot)
        for new in info.new_requests:
            assert new.history is not None, "a proposer needs EngineConfig.send_history"
            self._proposer.add(new.handle, new)
            self.planner.add(new.handle)
        first = info.merge_prompt[info.chunk_idx]
        sampled_last = (first == SAMPLED_LAST_STEP) & info.is_decoding
        kv_len = np.where(sampled_last, self._lengths[info.ids], info.kv_len).astype(np.int32)
        return replace(info, kv_len=kv_len)

    def expand(self, info: SchedulerInfo, left: Int64Array) -> SchedulerInfo | None:
        """The step with drafts behind the tokens of its decoding rows, or None if there are none.

        Args:
            left: [R] tokens that each row may still sample in this call.
        """
        self.drafting = 0.0
        rows = np.flatnonzero(info.is_decoding & (left > 1))
        tokens, limits = len(info.merge_prompt), self._limits
        budget = min(limits.max_batch_tokens - tokens, limits.max_decoding_batch - len(info.ids))
        if self._states is not None:
            budget = min(budget, self._states.draft_room)
        if budget < 1 or not len(rows) or self._scores(info):
            return None
        room = self.planner.room(left[rows] - 1, tokens, info.decoding_batch, budget)
        if not room.any():
            return None
        slots = info.ids[rows].astype(np.int64)
        started = time.perf_counter()
        drafts = self._proposer.propose(slots, room)
        self.drafting = time.perf_counter() - started
        assert (drafts.lengths <= room).all(), "more drafts than asked for"
        lengths = self.planner.pick(slots, drafts, tokens, info.decoding_batch, budget)
        return _with_drafts(info, rows, drafts, lengths) if lengths.any() else None

    def columns(self, info: SchedulerInfo) -> Columns:
        """What the step samples, draft by draft."""
        drafting = info.is_decoding & (info.chunk_len > 1)
        rows = np.flatnonzero(info.last_pos >= 0)
        offset = np.where(drafting, 0, info.last_pos)
        parts = [(rows, (info.chunk_idx + offset)[rows].astype(np.int64))]
        for column in range(1, int(info.chunk_len[drafting].max(initial=1))):
            rows = np.flatnonzero(drafting & (info.chunk_len > column))
            parts.append((rows, info.chunk_idx[rows].astype(np.int64) + column))
        return Columns(
            np.concatenate([rows for rows, _ in parts]),
            np.concatenate([index for _, index in parts]),
            np.repeat(np.arange(len(parts)), [len(rows) for rows, _ in parts]),
        )

    def verify(self, info: SchedulerInfo, columns: Columns, logits: torch.Tensor) -> list[Sampled]:
        """Samples each row's tokens as far as its drafts are right; one ``Sampled`` per column.

        Rows without rules are sampled at all places at once. The others go column after column, so
        that processors see exactly the tokens before each draw. If a draw raises, they are back
        where they were.

        Args:
            logits: [L, V] of the ``columns``, then of scored tokens.
        """
        width = int(columns.column[-1]) + 1
        results = [Sampled(np.full(len(info.ids), NO_TOKEN, np.int32)) for _ in range(width)]
        drafts = np.full((len(info.ids), width), NO_TOKEN, np.int32)
        drafts[columns.rows, columns.column] = info.merge_prompt[columns.index]
        plain = info.is_decoding & self._sampler.is_plain(info.ids)
        if plain.any():
            self._verify_at_once(info, columns, logits, plain, drafts, results)
        if not plain.all():
            self._verify_in_turn(info, columns, logits, ~plain, drafts, results)
        return results

    def remember(self, info: SchedulerInfo, results: Sequence[Sampled]) -> Int64Array:
        """Keeps what a forward gave: where its rows stand, and their tokens for the proposer.

        Returns:
            [R] tokens that each row has sampled.
        """
        tokens = np.stack([sampled.tokens for sampled in results], axis=1)
        counts: Int64Array = np.count_nonzero(tokens >= 0, axis=1)
        grown = np.where(info.is_decoding, counts, info.chunk_len)
        lengths = info.kv_len + grown
        self._lengths[info.ids] = lengths
        if self._states is not None and info.num_guessed:
            self._states.settle(lengths.astype(np.int64))
        rows = np.flatnonzero(counts)
        self._proposer.accept(info.ids[rows].astype(np.int64), tokens[rows], counts[rows])
        for sampled in results:
            self._slots.remember(info, sampled.tokens)
        if len(results) > 1:
            self._count(info, counts)
        return counts

    def take_usage(self) -> DraftUsage | None:
        """What became of the drafts since the last call, or None if there were none."""
        if not self._drafts:
            return None
        usage = DraftUsage(self._drafts, self._drafted, tuple(self._accepted.tolist()))
        self._drafts = self._drafted = 0
        self._accepted = np.zeros(0, np.int64)
        return usage

    def _scores(self, info: SchedulerInfo) -> bool:
        """Whether prompts are scored: they may take all logits that memory was measured with."""
        scored = self._slots.scored
        return bool(scored) and any(
            slot in scored for slot in info.ids[info.decoding_batch :].tolist()
        )

    def _count(self, info: SchedulerInfo, counts: Int64Array) -> None:
        rows = np.flatnonzero(info.is_decoding & (info.chunk_len > 1))
        drafted = info.chunk_len[rows].astype(np.int64) - 1
        right = np.clip(counts[rows] - 1, 0, drafted)
        self.planner.learn(info.ids[rows].astype(np.int64), drafted, right)
        self._drafts += len(rows)
        self._drafted += int(drafted.sum())
        places = np.cumsum(np.bincount(right, minlength=int(drafted.max()) + 1)[:0:-1])[::-1]
        total = np.zeros(max(len(places), len(self._accepted)), np.int64)
        total[: len(self._accepted)] += self._accepted
        total[: len(places)] += places
        self._accepted = total

    def _verify_at_once(
        self,
        info: SchedulerInfo,
        columns: Columns,
        logits: torch.Tensor,
        among: BoolArray,
        drafts: Int32Array,
        results: list[Sampled],
    ) -> None:
        picked = among[columns.rows]
        rows, column = columns.rows[picked], columns.column[picked]
        at = self._at(info, rows, columns.index[picked])
        part = logits[: len(picked)]
        if not picked.all():
            part = part[torch.from_numpy(np.flatnonzero(picked)).to(part.device)]
        tokens = np.full(drafts.shape, NO_TOKEN, np.int32)
        tokens[rows, column] = self._sampler.draw_plain(at, part)
        hits = self._slots.stops.hits(np.repeat(info.ids, len(results)), tokens.reshape(-1))
        stopped = hits.reshape(-1, len(results))
        agreed = (tokens[:, :-1] == drafts[:, 1:]) & (tokens[:, :-1] >= 0) & ~stopped[:, :-1]
        kept = np.logical_and.accumulate(agreed, axis=1)
        tokens[:, 1:][~kept] = NO_TOKEN
        sampled = np.zeros(tokens.shape, np.bool_)
        sampled[rows, column] = True
        sampled[:, 1:] &= kept
        for result, drawn, of_column in zip(results, tokens.T, sampled.T, strict=True):
            result.tokens[among] = drawn[among]
            bad = np.flatnonzero(of_column & (drawn < 0)).tolist()
            result.errors |= {row: NumericalError(NOT_FINITE) for row in bad}

    def _verify_in_turn(
        self,
        info: SchedulerInfo,
        columns: Columns,
        logits: torch.Tensor,
        among: BoolArray,
        drafts: Int32Array,
        results: list[Sampled],
    ) -> None:
        agreed, count = among.copy(), len(columns.rows)
        done: list[Sampled] = []
        try:
            for column in range(len(results)):
                if column:
                    drawn = done[-1].tokens
                    stopped = self._slots.stops.hits(info.ids, drawn)
                    agreed &= (drawn >= 0) & (drawn == drafts[:, column]) & ~stopped
                places = np.flatnonzero((columns.column == column) & agreed[columns.rows])
                if not len(places):
                    break
                part = logits[torch.from_numpy(places).to(logits.device)]
                if not column and count < len(logits):
                    part = torch.cat([part, logits[count:]])
                at = self._at(info, columns.rows[places], columns.index[places])
                done.append(self._sampler.sample(info, at, part))
        except Exception:
            for sampled in reversed(done):
                self._sampler.rollback(info, sampled.tokens)
            raise
        for result, sampled in zip(results, done, strict=False):
            result.tokens[among] = sampled.tokens[among]
            result.errors |= sampled.errors
            result.logprobs = sampled.logprobs
            result.prompt_logprobs = sampled.prompt_logprobs

    def _at(self, info: SchedulerInfo, rows: Int64Array, index: Int64Array) -> SampledRows:
        positions = info.kv_len[rows] + (index - info.chunk_idx[rows]).astype(np.int32) + 1
        slots = info.ids[rows]
        settings = self._slots.settings.of(slots, positions, self._device)
        return SampledRows(rows, slots, positions, settings)


def _with_drafts(
    info: SchedulerInfo, rows: Int64Array, drafts: Drafts, lengths: Int64Array
) -> SchedulerInfo:
    """The step with the first ``lengths`` [N] drafts of its decoding ``rows`` [N]."""
    decoding = info.decoding_batch
    counts = info.chunk_len.copy()
    counts[rows] += lengths.astype(np.int32)
    starts = (np.cumsum(counts) - counts).astype(np.int32)
    merged = np.empty(int(counts.sum()), np.int32)
    merged[starts[:decoding]] = info.merge_prompt[:decoding]
    columns = np.arange(drafts.tokens.shape[1])
    within = columns < lengths[:, None]
    merged[(starts[rows, None] + 1 + columns)[within]] = drafts.tokens[within]
    prompts = len(info.merge_prompt) - decoding
    if prompts:
        merged[-prompts:] = info.merge_prompt[decoding:]
    last_pos = info.last_pos.copy()
    last_pos[rows] = counts[rows] - 1
    return replace(info, chunk_idx=starts, chunk_len=counts, merge_prompt=merged, last_pos=last_pos)


def grants_of(info: SchedulerInfo) -> Int64Array:
    """[R] most tokens that each row samples in this call."""
    if info.grants is None:
        return np.where(info.is_decoding, info.num_steps, 1)
    return info.grants.astype(np.int64)


def last_tokens(results: Sequence[Sampled], counts: Int64Array) -> Int32Array:
    """[R] the last of the ``counts`` [R] tokens of each row; NO_TOKEN if it has failed."""
    tokens = np.stack([sampled.tokens for sampled in results], axis=1)
    last: Int32Array = tokens[np.arange(len(counts)), np.maximum(counts - 1, 0)]
    for sampled in results:
        last[list(sampled.errors)] = NO_TOKEN
    return last

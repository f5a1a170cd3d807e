"""Log probabilities for the rows that ask: of sampled tokens, and of a prompt's own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rayfin.actors.messages import (
    NO_TOKEN,
    BoolArray,
    Float32Array,
    Int32Array,
    Int64Array,
    Logprobs,
    SchedulerInfo,
)
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.kernels.sampling.sample import top_logprobs

ROWS_AT_ONCE = 256
"""Positions of a prompt scored together: bounds the memory, rows x vocabulary x fp32."""


def logprobs_of(logits: torch.Tensor, tokens: Int32Array, at: Int64Array, k: int) -> Logprobs:
    """What the model's raw logits [N, V] say of ``tokens`` [N], which go by the numbers ``at``."""
    parts = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        chosen = torch.from_numpy(tokens[rows].astype(np.int64)).to(logits.device)
        logprobs, ids, values, rank = top_logprobs(logits[rows], chosen, k)
        parts.append(
            Logprobs(
                at=at[rows].astype(np.int32),
                chosen=_floats(logprobs),
                rank=_ints(rank),
                ids=_ints(ids),
                values=_floats(values),
            )
        )
    return Logprobs.joined(parts)


def sampled_logprobs(
    logits: torch.Tensor, tokens: Int32Array, asking: BoolArray, at: Int64Array, k: int
) -> Logprobs | None:
    """Those of the rows [S] that are ``asking`` [S] and have sampled a token."""
    rows = np.flatnonzero(asking & (tokens >= 0))
    if not len(rows):
        return None
    index = torch.from_numpy(rows).to(logits.device)
    return logprobs_of(logits[index], tokens[rows], at[rows], k)


def of_named_tokens(
    logits: torch.Tensor, scores: Logprobs, at: Int64Array, named: Sequence[tuple[int, ...]]
) -> Logprobs:
    """Replaces the likeliest tokens of ``scores`` by those that requests name.

    Args:
        logits: [S, V], raw.
        at: [S] the numbers that the rows go by.
        named: for each row the token ids, none if its likeliest tokens stay.
    """
    widest = max(scores.ids.shape[1], *map(len, named))
    ids = np.full((len(scores.at), widest), NO_TOKEN, np.int32)
    values = np.full((len(scores.at), widest), -np.inf, np.float32)
    ids[:, : scores.ids.shape[1]], values[:, : scores.ids.shape[1]] = scores.ids, scores.values
    row_of = {number: row for row, number in enumerate(at.tolist())}
    for place, number in enumerate(scores.at.tolist()):
        if tokens := named[row_of[number]]:
            raw = logits[row_of[number]].float()
            picked = raw[torch.tensor(tokens, device=raw.device)] - torch.logsumexp(raw, 0)
            ids[place], values[place] = NO_TOKEN, -np.inf
            ids[place, : len(tokens)], values[place, : len(tokens)] = tokens, _floats(picked)
    return replace(scores, ids=ids, values=values)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk of a prompt that is scored: each of its tokens says something of the next one."""

    row: int
    k: int
    index: Int64Array  # [P] where the tokens stand in the step's T
    positions: Int64Array  # [P] of the tokens that they predict
    targets: Int32Array  # [P] those tokens
    named: Sequence[tuple[int, ...]] = ()  # P rows of ids to score too


def scored_chunks(info: SchedulerInfo, slots: RequestSlots) -> list[ScoredChunk]:
    """The chunks of requests that want their prompt's log probabilities."""
    chunks = []
    for row in range(info.decoding_batch, len(info.ids)):
        if (new := slots.scored.get(int(info.ids[row]))) is None:
            continue
        assert new.history is not None and new.sampling.prompt_logprobs is not None
        start, before = new.sampling.prompt_logprob_start + 1, int(info.kv_len[row]) + 1
        first = max(before, start)
        last = min(before + int(info.chunk_len[row]), new.prompt_len)
        if first < last:
            positions = np.arange(first, last)
            index = info.chunk_idx[row] + positions - before
            targets, named = new.history[positions], new.sampling.prompt_logprob_ids
            ids = named[first - start : last - start]
            chunks.append(
                ScoredChunk(row, new.sampling.prompt_logprobs, index, positions, targets, ids)
            )
    return chunks


def _floats(tensor: torch.Tensor) -> Float32Array:
    return tensor.float().cpu().numpy()


def _ints(tensor: torch.Tensor) -> Int32Array:
    return tensor.to(torch.int32).cpu().numpy()

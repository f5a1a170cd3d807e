"""SchedulerInfo + RequestSlots -> the tensors of one step, by index arithmetic only."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayfin.actors.messages import (
    SAMPLED_LAST_STEP,
    BoolArray,
    Int32Array,
    Int64Array,
    SchedulerInfo,
)
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.kernels.shapes import GroupedTables, PagedBatch, SamplingRows, all_to_device

ALL = slice(None)

SHIFTS = "position shifts"
"""Name of the row input that is added to positions, for rotary embeddings alone."""

STATES = "states"
"""Key in `PagedBatch.scratch` of the rows of states [2, R] that a decode step reads and writes."""

ADAPTERS = "adapters"
"""Name of the row input that numbers adapters, from 0 on; -1: the base model."""


@dataclass(frozen=True, slots=True)
class RowInput:
    """A number for each row of a decode step that a CUDA graph reads, in `PagedBatch.scratch`.

    A step in which no row needs it runs a graph without it.
    """

    name: str
    neutral: int  # of rows that it does not change
    of_slots: Callable[[Int32Array], Int64Array | None]  # [R]; None: no row needs it


@dataclass(slots=True, frozen=True)
class GivenInputs:
    """Inputs of G tokens that are no embedded tokens: parts of images."""

    index: torch.Tensor  # [G] int64, in T, rising
    states: torch.Tensor  # [G, hidden]
    added: torch.Tensor | None = None  # [G, L, hidden], to what the first L layers give


@dataclass(slots=True)
class StepInputs:
    """Everything that a model's forward reads."""

    input_ids: torch.Tensor  # [T] int64
    batch: PagedBatch
    sampled: torch.Tensor  # [S] int64, indices in T of the tokens whose logits are needed
    slots: Int32Array | None = None  # [R] the slot of each row's request, for data kept by slot:
    # adapters, positions of images
    token_types: torch.Tensor | None = None  # [T] int64, 1 in the second text of a pair
    first_prompt: int = 0  # the row from which on rows are parts of prompts
    given: GivenInputs | None = None  # what some tokens have in place of an embedding
    rope_positions: torch.Tensor | None = None  # [3, T] int64, where they are not the positions


@dataclass(slots=True)
class SampledRows:
    """What the sampler reads beside the logits of S rows."""

    rows: Int64Array  # [S], rows of the step
    slots: Int32Array  # [S]
    positions: Int32Array  # [S] of the tokens to sample
    settings: SamplingRows


def token_places(
    info: SchedulerInfo, page_size: int
) -> tuple[Int32Array, Int64Array, Int64Array, Int64Array]:
    """Returns (slot, position, page of its request, place there) of a step's tokens, [T] each."""
    tokens = len(info.merge_prompt)
    # The row of each of the T tokens.
    row = ALL if tokens == len(info.ids) else np.repeat(np.arange(len(info.ids)), info.chunk_len)
    positions = np.arange(tokens) + (info.kv_len - info.chunk_idx)[row]
    return info.ids[row], positions, *np.divmod(positions, page_size)


def build_inputs(
    info: SchedulerInfo, slots: RequestSlots, page_size: int, device: torch.device
) -> tuple[StepInputs, SampledRows]:
    """The tensors of a step; ``slots`` has already applied the step's diff."""
    tokens, lengths = len(info.merge_prompt), info.chunk_len
    slot, positions, page, within = token_places(info, page_size)
    sampled_last = info.merge_prompt == SAMPLED_LAST_STEP
    input_ids = np.where(sampled_last, slots.last_token[slot], info.merge_prompt)
    kv_len = info.kv_len + lengths
    query_start = np.empty(len(lengths) + 1, np.int32)
    query_start[:-1], query_start[-1] = info.chunk_idx, tokens
    widest = int(info.kv_page_len.max())
    rows = (info.last_pos >= 0).nonzero()[0]
    at = info.ids[rows], kv_len[rows]
    settings = slots.settings.unsent(at[0], device)
    tables = slots.page_tables[info.ids, :widest]
    places = slots.page_tables[slot, page] * np.int64(page_size) + within
    arrays: list[npt.NDArray[Any]] = [
        query_start,
        kv_len,
        tables,
        places,
        positions,
        input_ids.astype(np.int64),
        (info.chunk_idx + info.last_pos)[rows].astype(np.int64),
        at[1].astype(np.int64),
    ]
    if len(slots.beside):
        more = slots.beside[:, slot, page] * np.int64(page_size) + within
        arrays.append(np.concatenate([tables[None], slots.beside[:, info.ids, :widest]]))
        arrays.append(np.concatenate([places[None], more]))
    sent = all_to_device([*settings, *arrays], device)
    of_rows, sent = sent[: len(settings)], sent[len(settings) :]
    starts, lengths_on, tables_on, places_on, positions_on, ids, sampled, next_on, *groups = sent
    batch = PagedBatch(
        query_start=starts,
        kv_len=lengths_on,
        page_tables=tables_on,
        slots=places_on,
        positions=positions_on,
        query_start_cpu=query_start,
        kv_len_cpu=kv_len,
        decoding=0 if info.num_guessed else info.decoding_batch,
        page_size=page_size,
        groups=GroupedTables(*groups) if groups else None,
    )
    inputs = StepInputs(
        input_ids=ids,
        batch=batch,
        sampled=sampled,
        slots=info.ids,
        first_prompt=info.decoding_batch,
    )
    return inputs, SampledRows(rows, *at, slots.settings.rows(at[0], next_on, of_rows))


def decoding_rows(info: SchedulerInfo, rows: Int64Array) -> SchedulerInfo:
    """The ``rows`` [N] of a step that only decodes, without its diff."""
    steady = np.arange(len(rows), dtype=np.int32)
    none = np.zeros(0, np.int32)
    return replace(
        info,
        ids=info.ids[rows],
        chunk_idx=steady,
        chunk_len=np.ones_like(steady),
        merge_prompt=info.merge_prompt[rows],
        kv_len=info.kv_len[rows],
        kv_page_len=info.kv_page_len[rows],
        last_pos=np.zeros_like(steady),
        is_decoding=info.is_decoding[rows],
        decoding_batch=len(rows),
        new_pages=none,
        new_pages_len=np.zeros_like(steady),
        new_requests=[],
        finished=[],
        grants=None if info.grants is None else info.grants[rows],
    )


def next_step_info(
    info: SchedulerInfo, rows: BoolArray, grown: Int64Array | int = 1
) -> SchedulerInfo:
    """The next step of the call: its decoding ``rows`` [R], each with the token just sampled.

    Its rows have ``grown`` [R] more tokens in the cache.
    """
    kv_len = (info.kv_len + grown).astype(np.int32)
    if len(info.merge_prompt) == len(info.ids) and rows.all():  # only their positions change
        merged = np.full_like(info.ids, SAMPLED_LAST_STEP)
        return replace(info, kv_len=kv_len, merge_prompt=merged)
    count = int(rows.sum())
    steady = np.arange(count, dtype=np.int32)
    return replace(
        info,
        ids=info.ids[rows],
        chunk_idx=steady,
        chunk_len=np.ones_like(steady),
        merge_prompt=np.full_like(steady, SAMPLED_LAST_STEP),
        kv_len=kv_len[rows],
        kv_page_len=info.kv_page_len[rows],
        last_pos=np.zeros_like(steady),
        is_decoding=info.is_decoding[rows],
        decoding_batch=count,
        grants=None if info.grants is None else info.grants[rows],
    )

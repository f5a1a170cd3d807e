"""SchedulerInfo + RequestSlots -> the tensors of one step, by index arithmetic only."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from rayfin.actors.messages import SAMPLED_LAST_STEP, BoolArray, Int64Array, SchedulerInfo
from rayfin.actors.runner.step.request_slots import RequestSlots
from rayfin.kernels.shapes import PagedBatch, SamplingRows
from rayfin.kernels.staging import to_device


@dataclass(slots=True)
class StepInputs:
    """Everything that a forward and the sampling after it need."""

    input_ids: torch.Tensor  # [T] int64
    batch: PagedBatch
    sampled_rows: Int64Array  # [S], rows of the step that sample a token
    sampled: torch.Tensor  # [S] int64, the index in T of each one's last token
    sampling: SamplingRows


def build_inputs(
    info: SchedulerInfo, slots: RequestSlots, page_size: int, device: torch.device
) -> StepInputs:
    """The tensors of a step; ``slots`` has already taken in the step's news."""
    tokens, lengths = len(info.merge_prompt), info.chunk_len
    row = np.repeat(np.arange(len(info.ids)), lengths)  # [T]
    positions = np.arange(tokens) + (info.kv_len - info.chunk_idx)[row]
    pages = slots.page_tables[info.ids[row], positions // page_size]
    input_ids = np.where(info.merge_prompt < 0, slots.last_token[info.ids[row]], info.merge_prompt)
    kv_len = info.kv_len + lengths
    query_start = np.append(info.chunk_idx, np.int32(tokens))
    widest = int(info.kv_page_len.max())
    sampled_rows = np.flatnonzero(info.last_pos >= 0)
    batch = PagedBatch(
        query_start=to_device(query_start, device),
        kv_len=to_device(kv_len, device),
        page_tables=to_device(slots.page_tables[info.ids, :widest], device),
        slots=to_device(pages.astype(np.int64) * page_size + positions % page_size, device),
        positions=to_device(positions, device),
        query_start_cpu=query_start,
        kv_len_cpu=kv_len,
        decoding=info.decoding_batch,
        page_size=page_size,
    )
    return StepInputs(
        input_ids=to_device(input_ids.astype(np.int64), device),
        batch=batch,
        sampled_rows=sampled_rows,
        sampled=to_device((info.chunk_idx + info.last_pos)[sampled_rows].astype(np.int64), device),
        sampling=_sampling_rows(info.ids[sampled_rows], kv_len[sampled_rows], slots, device),
    )


def next_step_info(info: SchedulerInfo, rows: BoolArray) -> SchedulerInfo:
    """The next step within a lease: the decoding ``rows`` [R], each with the token just sampled."""
    count = int(rows.sum())
    steady = np.arange(count, dtype=np.int32)
    return replace(
        info,
        ids=info.ids[rows],
        chunk_idx=steady,
        chunk_len=np.ones_like(steady),
        merge_prompt=np.full_like(steady, SAMPLED_LAST_STEP),
        kv_len=info.kv_len[rows] + 1,
        kv_page_len=info.kv_page_len[rows],
        last_pos=np.zeros_like(steady),
        is_decoding=info.is_decoding[rows],
        decoding_batch=count,
    )


def _sampling_rows(
    ids: np.ndarray, positions: np.ndarray, slots: RequestSlots, device: torch.device
) -> SamplingRows:
    """Settings of the sampled rows; a sampled token's position is the tokens before it."""
    top_k, top_p, min_p = slots.top_k[ids], slots.top_p[ids], slots.min_p[ids]
    temperature = slots.temperature[ids]
    return SamplingRows(
        temperature=to_device(temperature, device),
        top_k=to_device(top_k, device),
        top_p=to_device(top_p, device),
        min_p=to_device(min_p, device),
        seed=to_device(slots.seed[ids], device),
        position=to_device(positions.astype(np.int64), device),
        all_greedy=not temperature.any(),
        any_top_k=bool(top_k.any()),
        any_top_p=bool((top_p < 1).any()),
        any_min_p=bool(min_p.any()),
    )

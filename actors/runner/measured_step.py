"""The steps whose time is measured when a runner starts (``actors/step_cost.py``)."""

import time
from collections.abc import Callable

import numpy as np
import torch

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import SchedulerInfo
from rayfin.actors.runner.batch import StepInputs, build_inputs
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.actors.step_cost import StepCost

ROW_TOKENS = 8

MEASURED_CONTEXT = 256
"""Tokens of context of the steps that are measured."""


@torch.inference_mode()
def measure_steps(
    forward: Callable[[StepInputs], object],
    config: EngineConfig,
    device: torch.device,
    states: StateTensors | None = None,
    *,
    few: bool = False,
) -> StepCost:
    """Times steps of some sizes on the first pages, which hold nothing yet.

    With ``few`` it takes a fraction of a second at most.
    With ``states`` of recurrent layers their rows have no more drafts than there are states for.
    """
    page_size = config.page_size
    limits = config.limits
    max_tokens = min(
        limits.max_decoding_batch + config.num_speculative_tokens, limits.max_batch_tokens
    )
    drafts = None
    if states is not None:
        drafts = states.draft_room
        max_tokens = min(max_tokens, limits.max_decoding_batch + drafts)
    context = min(MEASURED_CONTEXT, config.max_model_len, config.num_pages * page_size)

    def run(tokens: int) -> float:
        info = decode_step(tokens, context, page_size, drafts)
        if states is not None:
            states.assume(info.ids.astype(np.int64), info.kv_len.astype(np.int64))
        slots = RequestSlots(len(info.ids), int(info.kv_page_len.max()))
        slots.apply(info)
        started = time.perf_counter()
        inputs, _ = build_inputs(info, slots, page_size, device)
        forward(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    cost = StepCost.sketched(run, max_tokens) if few else StepCost.measured(run, max_tokens)
    if states is not None:
        states.forget()
    return cost


def decode_step(
    tokens: int, context: int, page_size: int, drafts: int | None = None
) -> SchedulerInfo:
    """A step of so many tokens, ``ROW_TOKENS`` a row, at the end of one and the same context.

    There are more rows where these would have more than so many ``drafts``; None: no limit.
    """
    rows = max(-(-tokens // ROW_TOKENS), 0 if drafts is None else tokens - drafts)
    lengths = np.full(rows, tokens // rows, np.int32)
    lengths[: tokens % rows] += 1
    lengths = np.minimum(lengths, np.int32(context))
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

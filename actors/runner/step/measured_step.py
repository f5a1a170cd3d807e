"""The steps whose time is measured when a runner starts (``actors/step_cost.py``)."""

import time
from collections.abc import Callable

import numpy as np
import torch

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import SchedulerInfo
from rayfin.actors.runner.step.batch import StepInputs, build_inputs
from rayfin.actors.runner.step.request_slots import RequestSlots
from rayfin.actors.step_cost import StepCost

ROW_TOKENS = 8

MEASURED_CONTEXT = 256
"""Tokens of context of the steps that are measured."""


@torch.inference_mode()
def measure_steps(
    forward: Callable[[StepInputs], object],
    config: EngineConfig,
    page_size: int,
    device: torch.device,
) -> StepCost:
    """Times steps of some sizes on the first pages, which hold nothing yet."""
    limits = config.limits
    most = min(limits.max_decoding_batch + config.num_speculative_tokens, limits.max_batch_tokens)
    context = min(MEASURED_CONTEXT, config.num_pages * page_size)

    def run(tokens: int) -> float:
        info = decode_step(tokens, context, page_size)
        slots = RequestSlots(len(info.ids), int(info.kv_page_len.max()))
        slots.apply(info)
        started = time.perf_counter()
        inputs, _ = build_inputs(info, slots, page_size, device)
        forward(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    return StepCost.measured(run, most)


def decode_step(tokens: int, context: int, page_size: int) -> SchedulerInfo:
    """A step of so many tokens, ``ROW_TOKENS`` a row, at the end of one and the same context."""
    rows = -(-tokens // ROW_TOKENS)
    lengths = np.full(rows, min(tokens, ROW_TOKENS, context), np.int32)
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

"""Compiles kernels before requests come, by steps of the sizes that they are compiled for."""

import numpy as np
import torch

from rayfin.actors.messages import NewRequest, Sampling, SchedulerInfo
from rayfin.actors.runner.batch import build_inputs
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampler
from rayfin.actors.runner.speculation.draft_model import DraftedModel

WARMED_TOKENS = (1, 2, 4, 8, 16, 17, 33, 65, 129)
"""The heights of products of few rows and of tiles of weights of few bits, and a step of many rows,
for which these weights are made whole."""

SETTINGS = Sampling(temperature=0.6, top_k=20, top_p=0.95)


@torch.inference_mode()
def warm_up(
    model: StepModel,
    sampler: Sampler | None,
    page_size: int,
    num_pages: int,
    most_tokens: int,
    device: torch.device,
) -> None:
    """Runs steps of a decode row, alone and with a prompt, and samples; writes over pages.

    None has more than ``most_tokens``: the largest step, for which memory was measured, or a
    request's length.

    A kernel compiles for about a second. A step that met it first would exceed the time limit of a
    step. ``sampler`` is None where a rank has no logits. A draft model's kernels are for its own
    sizes, so it runs the same steps.
    """
    if isinstance(model, DraftedModel):
        draft_tokens = min(most_tokens, model.draft_positions or most_tokens)
        warm_up(model.draft, None, page_size, num_pages, draft_tokens, device)
    for tokens in WARMED_TOKENS:
        if tokens > min(num_pages * page_size, most_tokens):
            return
        info = first_step(tokens, page_size)
        slots = RequestSlots(2, len(info.new_pages))
        slots.apply(info)
        inputs, at = build_inputs(info, slots, page_size, device)
        logits = model.forward(inputs)
        if sampler is not None:
            sampler.warm_up(at, logits)


def first_step(tokens: int, page_size: int) -> SchedulerInfo:
    """A decode row at position 0 and a prompt, of ``tokens`` in all; both on the same pages."""
    chunk = np.array([1, tokens - 1] if tokens > 1 else [1], np.int32)
    rows = len(chunk)
    pages = -(-chunk // page_size)
    return SchedulerInfo(
        epoch=0,
        step=0,
        ids=np.arange(rows, dtype=np.int32),
        chunk_idx=np.arange(rows, dtype=np.int32),
        chunk_len=chunk,
        merge_prompt=np.zeros(tokens, np.int32),
        kv_len=np.zeros(rows, np.int32),
        kv_page_len=pages,
        last_pos=chunk - 1,
        is_decoding=np.arange(rows) == 0,
        decoding_batch=1,
        prefill_batch=rows - 1,
        new_pages=np.concatenate([np.arange(count, dtype=np.int32) for count in pages]),
        new_pages_len=pages,
        new_requests=[NewRequest(slot, SETTINGS, cap=tokens + 1) for slot in range(rows)],
    )

"""A step whose computation raises: which rows are at fault, and the others' results all the same.

Halves are computed again in the order of the rows, since a row may read pages that one before it
writes; those that raise are halved again. Writing keys and values twice changes nothing.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import NO_TOKEN, Logprobs, SchedulerInfo
from rayfin.actors.runner.sampling.sampler import Sampled

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


def isolate(
    compute: Callable[[SchedulerInfo], Sampled], info: SchedulerInfo, error: Exception
) -> Sampled:
    """What ``compute`` gives for the step's rows, each of those at fault with an error of its own.

    Args:
        error: what it has raised for all of them.

    Raises:
        Exception: ``error``, if no row can be computed, and they are several: it is not theirs.
            Out of memory, if a single row takes too much.
    """
    sampled = _halve(compute, info, error)
    if len(sampled.errors) == len(info.ids) > 1:
        raise error
    return sampled


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory has run out: of this process, or of a device, which torch says in words."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in OUT_OF_MEMORY)


def _halve(
    compute: Callable[[SchedulerInfo], Sampled], info: SchedulerInfo, error: Exception
) -> Sampled:
    rows = len(info.ids)
    if rows == 1:
        if is_out_of_memory(error):
            raise error
        logger.error("a row failed: %s", error, exc_info=error)
        failed = error
        if not isinstance(failed, RequestFailed):
            failed = RequestFailed(f"{type(error).__name__}: {error}")
        return Sampled(np.full(1, NO_TOKEN, np.int32), {0: failed})
    parts = []
    for half in (rows_of(info, 0, rows // 2), rows_of(info, rows // 2, rows)):
        try:
            parts.append(compute(half))
        except Exception as again:
            parts.append(_halve(compute, half, again))
    return _joined(parts)


def rows_of(info: SchedulerInfo, start: int, stop: int) -> SchedulerInfo:
    """The step with the rows [start, stop) only; its news are not repeated."""
    rows = slice(start, stop)
    first = int(info.chunk_idx[start])
    tokens = int(info.chunk_len[rows].sum())
    decoding = min(max(info.decoding_batch - start, 0), stop - start)
    pages = np.concatenate([[0], np.cumsum(info.new_pages_len)])
    return replace(
        info,
        ids=info.ids[rows],
        chunk_idx=info.chunk_idx[rows] - first,
        chunk_len=info.chunk_len[rows],
        merge_prompt=info.merge_prompt[first : first + tokens],
        kv_len=info.kv_len[rows],
        kv_page_len=info.kv_page_len[rows],
        last_pos=info.last_pos[rows],
        is_decoding=info.is_decoding[rows],
        decoding_batch=decoding,
        prefill_batch=stop - start - decoding,
        new_pages=info.new_pages[pages[start] : pages[stop]],
        new_pages_len=info.new_pages_len[rows],
        new_requests=[],
        finished=[],
        grants=None if info.grants is None else info.grants[rows],
    )


def _joined(parts: list[Sampled]) -> Sampled:
    """The parts' results under the row numbers of the whole."""
    whole = Sampled(np.concatenate([part.tokens for part in parts]))
    logprobs: list[Logprobs] = []
    start = 0
    for part in parts:
        rows = np.arange(start, start + len(part.tokens))
        whole.errors |= {start + row: error for row, error in part.errors.items()}
        whole.prompt_logprobs |= {
            start + row: logprobs for row, logprobs in part.prompt_logprobs.items()
        }
        whole.vectors |= {start + row: vector for row, vector in part.vectors.items()}
        if part.logprobs is not None:
            logprobs.append(part.logprobs.renumbered(rows))
        start += len(part.tokens)
    whole.logprobs = Logprobs.joined(logprobs) if logprobs else None
    return whole


def leave_broken_device(device: torch.device, error: Exception) -> None:
    """Exits if the CUDA context is broken: then every call fails until the process ends."""
    if device.type != "cuda" or is_out_of_memory(error):
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        logger.exception("the device is broken: this runner exits")
        os._exit(1)

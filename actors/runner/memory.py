"""How much memory is left for pages, found by running the largest step once."""

import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rayfin.actors.config import DEFAULT_MEMORY_UTILIZATION, BatchLimits
from rayfin.actors.messages import Int32Array, NewRequest, Sampling, SchedulerInfo

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_bytes(
    run_largest_step: Callable[[], int],
    device: torch.device,
    utilization: float | None,
    ranks: int = 1,
) -> int:
    """memory x utilization - what the process holds at the peak of the largest step, bytes.

    The peak counts weights and activations, measured, not modelled (vLLM's profiling run), without
    the pages that the step took: it says how many bytes. May be negative. The ``ranks`` of a group
    have a GPU each, but share a host's memory.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        pages = run_largest_step()
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        elsewhere = total - free - torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
        return share_bytes(device, utilization) - (peak - pages) - max(elsewhere, 0)
    _reset_peak()
    pages = run_largest_step()
    return share_bytes(device, utilization, ranks) - (_peak_bytes() - pages)


def share_bytes(device: torch.device, utilization: float | None, ranks: int = 1) -> int:
    """Returns the memory that a runner may take, bytes; the ``ranks`` of a group share a host's."""
    share = utilization or DEFAULT_MEMORY_UTILIZATION[device.type]
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1] * share)
    return int(total_host_bytes() * share / ranks)


def bytes_taken(make: Callable[[], object], device: torch.device) -> int:
    """A GPU's memory that is gone while what ``make`` gives is held, by whom ever; on a CPU 0, and
    it is not made.

    Graphs, their pool and the kernels loaded for them are not all torch's: the driver is asked.
    What stays behind (kernels) is there for the next one, and is counted here.
    """
    if device.type != "cuda":
        return 0
    before = _free_bytes(device)
    held = make()
    after = _free_bytes(device)
    del held
    _free_bytes(device)
    return max(before - after, 0)


def _free_bytes(device: torch.device) -> int:
    """Free on the device, when torch has given back what it keeps for later."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def total_host_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def _reset_peak() -> None:
    """Forgets the peak of loading, where Linux lets us; else the measure is pessimistic."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _peak_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The largest step an engine can be asked for, to measure memory with.


def largest_step(
    limits: BatchLimits, page_size: int, model_len: int
) -> tuple[SchedulerInfo, Int32Array]:
    """Prompts of up to ``model_len`` tokens that fill a step, and how many pages each one takes.

    None is longer than a request may be: a model with learned positions has no others.
    """
    rows = min(limits.max_prefill_batch, limits.max_decoding_batch)
    tokens = min(limits.max_batch_tokens, rows * model_len)
    starts = np.arange(0, tokens, model_len, dtype=np.int32)
    lengths = np.minimum(tokens - starts, model_len).astype(np.int32)
    pages = -(-lengths // page_size)
    ids = np.arange(len(starts), dtype=np.int32)
    info = SchedulerInfo(
        epoch=0,
        step=0,
        ids=ids,
        chunk_idx=starts,
        chunk_len=lengths,
        merge_prompt=np.zeros(tokens, np.int32),
        kv_len=np.zeros_like(ids),
        kv_page_len=pages,
        last_pos=lengths - 1,
        is_decoding=np.zeros(len(ids), np.bool_),
        decoding_batch=0,
        prefill_batch=len(ids),
        new_pages=np.arange(pages.sum(), dtype=np.int32),
        new_pages_len=pages,
        new_requests=[NewRequest(handle, Sampling(), cap=model_len) for handle in ids.tolist()],
    )
    return info, pages

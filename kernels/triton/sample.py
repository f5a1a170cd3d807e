"""Samples on a GPU in four launches without a sort."""

from typing import Any

import torch
import triton

from rayfin.kernels.shapes import SamplingRows
from rayfin.kernels.triton.device.sample_kernels import (
    draw_rows,
    find_highest,
    find_top,
    weigh_blocks,
)
from rayfin.kernels.triton.pdl import launch_options

BLOCK = 4096
TOP = 32
"""Most top tokens of each block, among which top-k and top-p are searched first."""


def sample(
    logits: torch.Tensor,  # [S, V] any float dtype
    rows: SamplingRows,
    *,
    out: torch.Tensor | None = None,  # [S] int64
    pdl: bool = False,
) -> torch.Tensor:
    """`rayfin.kernels.sampling.sample.sample` for a GPU: [S] int64, which is ``out`` if given.

    The draws are the same. Where a token's weight differs from the CPU's in the last bit of an
    exponential, about one draw in 2**22 gives a neighbouring token. A row that cannot be
    sampled (`find_bad_rows`) gets -1.
    """
    count, vocabulary = logits.shape
    device = logits.device
    tokens = torch.empty(count, dtype=torch.int64, device=device) if out is None else out
    if not count:
        return tokens
    blocks = triton.cdiv(vocabulary, BLOCK)
    highest = torch.empty(count, blocks, dtype=torch.float32, device=device)
    likeliest = torch.empty(count, blocks, dtype=torch.int32, device=device)
    weights = torch.empty(count, blocks, dtype=torch.int64, device=device)
    left_out = torch.empty(count, blocks, dtype=torch.float32, device=device)
    keys = torch.empty(count, blocks, TOP, dtype=torch.int64, device=device)
    filters = (rows.temperature, rows.top_k, rows.top_p)
    sizes = (logits.stride(0), vocabulary, blocks)
    width = triton.next_power_of_2(blocks)
    options: dict[str, Any] = {"BLOCK": BLOCK, **launch_options(pdl)}
    find_highest[(count, blocks)](logits, highest, likeliest, *sizes, num_warps=8, **options)
    find_top[(count, blocks)](
        logits,
        *filters,
        left_out,
        keys,
        *sizes,
        TOP=TOP,
        GROUP=group_size(BLOCK, TOP),
        num_warps=8,
        **options,
    )
    weigh_blocks[(count, blocks)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.min_p,
        highest,
        weights,
        *sizes,
        BLOCKS=width,
        num_warps=8,
        **options,
    )
    draw_rows[(count,)](
        logits,
        *filters,
        rows.min_p,
        rows.seed,
        rows.position,
        highest,
        likeliest,
        left_out,
        weights,
        keys,
        tokens,
        *sizes,
        TOP=TOP,
        BLOCKS=width,
        num_warps=16,  # fewer would spill registers
        **options,
    )
    return tokens


def group_size(block: int, top: int) -> int:
    """Tokens of a group, of which the search for a block's top tokens reads the highest logit."""
    return min(8, max(1, block // (16 * top)))

"""Samples on a GPU in three launches without a sort."""

import torch
import triton

from rayfin.kernels.shapes import SamplingRows
from rayfin.kernels.triton.device.sample_kernels import draw_rows, find_highest, weigh_blocks

BLOCK = 4096
TOP = 32
"""Top tokens of each block, among which top-k and top-p are searched first."""


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """`rayfin.kernels.sampling.sample.sample` for a GPU: [S, V] any float dtype -> [S] int64.

    The draws are the same. Where a token's weight differs from the CPU's in the last bit of an
    exponential, about one draw in 2**22 gives a neighbouring token. A row that cannot be
    sampled (`find_bad_rows`) gets -1.
    """
    count, vocabulary = logits.shape
    device = logits.device
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    if not count:
        return tokens
    blocks = triton.cdiv(vocabulary, BLOCK)
    highest = torch.empty(count, blocks, dtype=torch.float32, device=device)
    likeliest = torch.empty(count, blocks, dtype=torch.int32, device=device)
    weights = torch.empty(count, blocks, dtype=torch.int64, device=device)
    keys = torch.empty(count, blocks, TOP, dtype=torch.int64, device=device)
    filters = (rows.temperature, rows.top_k, rows.top_p)
    sizes = (logits.stride(0), vocabulary, blocks)
    width = triton.next_power_of_2(blocks)
    find_highest[(count, blocks)](
        logits, *filters, highest, likeliest, keys, *sizes, TOP=TOP, BLOCK=BLOCK, num_warps=8
    )
    weigh_blocks[(count, blocks)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.min_p,
        highest,
        weights,
        *sizes,
        BLOCK=BLOCK,
        BLOCKS=width,
        num_warps=8,
    )
    draw_rows[(count,)](
        logits,
        *filters,
        rows.min_p,
        rows.seed,
        rows.position,
        highest,
        likeliest,
        weights,
        keys,
        tokens,
        *sizes,
        TOP=TOP,
        BLOCK=BLOCK,
        BLOCKS=width,
        num_warps=16,  # fewer would spill registers,
    )
    return tokens

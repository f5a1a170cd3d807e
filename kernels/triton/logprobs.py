"""Log probabilities on a GPU: two launches, nothing sorted."""

import torch
import triton

from rayfin.kernels.triton.device.logprob_kernels import merge_blocks, summarise_blocks

BLOCK = 4096
MOST_TOP = 32
"""Of the likeliest tokens that a row may ask for; who wants more gets them by a sort."""


def top_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    asked: torch.Tensor,
    values: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """`rayfin.kernels.sampling.logprobs.top_logprobs` for the rows that ask, into given tensors.

    Args:
        logits: [S, V] any float dtype, before temperature and filters.
        tokens: [S] int64, what was sampled.
        asked: [S] int32, how many of the likeliest, at most ``MOST_TOP``; negative skips the row.
        values: [S, 1 + MOST_TOP] fp32, written: the token's log probability, the likeliest ones'.
        numbers: [S, 1 + MOST_TOP] int32, written: the token's rank, the likeliest tokens.
            What a row did not ask for, or the vocabulary does not have, is nothing.
    """
    count, vocabulary = logits.shape
    if not count:
        return
    blocks = triton.cdiv(vocabulary, BLOCK)
    device = logits.device
    keys = torch.empty(count, blocks, MOST_TOP, dtype=torch.int64, device=device)
    highest, total = torch.empty(2, count, blocks, dtype=torch.float32, device=device)
    above = torch.empty(count, blocks, dtype=torch.int32, device=device)
    parts = (keys, highest, total, above)
    summarise_blocks[(count, blocks)](
        logits,
        tokens,
        asked,
        *parts,
        logits.stride(0),
        vocabulary,
        blocks,
        MOST=MOST_TOP,
        BLOCK=BLOCK,
        num_warps=8,
    )
    merge_blocks[(count,)](
        logits,
        tokens,
        asked,
        *parts,
        values,
        numbers,
        logits.stride(0),
        blocks,
        MOST=MOST_TOP,
        BLOCKS=triton.next_power_of_2(blocks),
        CANDIDATES=triton.next_power_of_2(blocks * MOST_TOP),
        num_warps=8,
    )

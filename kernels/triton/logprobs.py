"""Log probabilities on a GPU, in two launches without a sort."""

import torch
import triton

from rayfin.kernels.triton.device.logprob_kernels import merge_blocks, summarise_blocks

BLOCK = 4096
MAX_TOP_LOGPROBS = 32
"""Top tokens of a row; requests for more are served by a sort."""


def top_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_logprobs: torch.Tensor,
    values: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """`rayfin.kernels.sampling.sample.top_logprobs` for the rows that want it, in place.

    Args:
        logits: [S, V] any float dtype, before temperature and filters.
        tokens: [S] int64, the sampled tokens.
        num_logprobs: [S] int32, number of top tokens, at most N = ``MAX_TOP_LOGPROBS``; negative
            skips the row.
        values: [S, 1 + N] fp32, written: the log probabilities of the token and of the top tokens.
        numbers: [S, 1 + N] int32, written: the token's rank and the top tokens.
            Entries beyond ``num_logprobs`` or the vocabulary are undefined.
    """
    count, vocabulary = logits.shape
    if not count:
        return
    blocks = triton.cdiv(vocabulary, BLOCK)
    device = logits.device
    keys = torch.empty(count, blocks, MAX_TOP_LOGPROBS, dtype=torch.int64, device=device)
    highest, total = torch.empty(2, count, blocks, dtype=torch.float32, device=device)
    above = torch.empty(count, blocks, dtype=torch.int32, device=device)
    parts = (keys, highest, total, above)
    summarise_blocks[(count, blocks)](
        logits,
        tokens,
        num_logprobs,
        *parts,
        logits.stride(0),
        vocabulary,
        blocks,
        MAX_TOP=MAX_TOP_LOGPROBS,
        BLOCK=BLOCK,
        num_warps=8,
    )
    merge_blocks[(count,)](
        logits,
        tokens,
        num_logprobs,
        *parts,
        values,
        numbers,
        logits.stride(0),
        blocks,
        MAX_TOP=MAX_TOP_LOGPROBS,
        BLOCKS=triton.next_power_of_2(blocks),
        CANDIDATES=triton.next_power_of_2(blocks * MAX_TOP_LOGPROBS),
        num_warps=8,
    )

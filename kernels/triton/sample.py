"""Samples on a GPU in one launch without a sort."""

import torch

from rayfin.kernels.shapes import SamplingRows
from rayfin.kernels.triton.device.sample_kernels import sample_rows

BLOCK = 4096


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """`rayfin.kernels.sampling.sample.sample` for a GPU: [S, V] any float dtype -> [S] int64.

    The draws are the same. Where a token's weight differs from the CPU's in the last bit of an
    exponential, about one draw in 2**22 gives a neighbouring token. A row that cannot be
    sampled (`find_bad_rows`) gets -1.
    """
    count, vocabulary = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        sample_rows[(count,)](
            logits,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seed,
            rows.position,
            tokens,
            logits.stride(0),
            vocabulary,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return tokens

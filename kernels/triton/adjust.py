"""Applies token rules to logits on a GPU, like `kernels/sampling` does on a CPU."""

import torch
import triton

from rayfin.kernels.shapes import RuleTensors
from rayfin.kernels.triton.device import adjust_kernels as kernels

BLOCK = 4096
ENTRIES_AT_ONCE = 1024


def adjust(logits: torch.Tensor, rules: RuleTensors, positions: torch.Tensor) -> torch.Tensor:
    """Applies the rules: [S, V] any float -> [S, V] fp32.

    ``positions`` [S] int64 are those of the tokens to sample. Logits that are not finite stay.
    """
    count, vocabulary = logits.shape
    out = torch.empty(count, vocabulary, dtype=torch.float32, device=logits.device)
    kernels.copy_rows[(count, triton.cdiv(vocabulary, BLOCK))](
        logits, rules.restricted, out, logits.stride(0), vocabulary, BLOCK=BLOCK, num_warps=8
    )
    kernels.adjust_rows[(count,)](
        logits,
        out,
        positions,
        rules.first,
        rules.length,
        rules.restricted,
        rules.banned_until,
        rules.repetition,
        rules.presence,
        rules.frequency,
        rules.token,
        rules.count,
        rules.kind,
        rules.bias,
        logits.stride(0),
        vocabulary,
        BLOCK=ENTRIES_AT_ONCE,
        num_warps=4,
    )
    return out


def count_sampled(sampled: torch.Tensor, rules: RuleTensors, remaining: torch.Tensor) -> None:
    """Counts the tokens [S] int64 just sampled, of rows with ``remaining`` [S] int32 steps."""
    kernels.count_rows[(len(sampled),)](
        sampled,
        remaining,
        rules.counted,
        rules.first,
        rules.length,
        rules.token,
        rules.count,
        rules.kind,
        rules.bias,
        BLOCK=ENTRIES_AT_ONCE,
        num_warps=1,
    )

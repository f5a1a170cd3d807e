"""Probabilities as integers, and an exact order of logits: sums and ties that cannot wobble.

Adding floats gives a result that depends on the order of the additions, and with it on the batch
shape and the device. Token weights are therefore 40-bit fixed point integers: their sums are exact
in any order, so a row's token does not depend on its batch mates, and a cumulative sum never steps
back. Tokens less than 2**-40 times as likely as the likeliest one have weight zero.
"""

import torch

WEIGHT_BITS = 40  # 2**40 * vocabulary size must stay below 2**63: any vocabulary up to 2**22


def fixed_point_weights(logits: torch.Tensor) -> torch.Tensor:
    """Unnormalised softmax: [S, V] fp32 -> [S, V] int64 in 0 .. 2**WEIGHT_BITS, the maximum's."""
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    return weights.mul_(float(1 << WEIGHT_BITS)).long()  # a power of two: exact in fp32


def sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """[S, V] fp32 -> [S, V] int64, all different, in the order "higher logit, then lower index"."""
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: -0.0 and 0.0 are a tie
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # IEEE 754 floats sort as integers
    index = torch.arange(logits.shape[-1], device=logits.device)
    return (ordered << 32) | (0xFFFFFFFF - index)


def stable_top(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` highest logits, highest first, lower index first among equals.

    [S, V] fp32 -> [S, count] int64. `torch.topk` promises nothing about equals.
    """
    return torch.topk(sort_keys(logits), count, dim=-1, sorted=True).indices

"""Tokens that may not be sampled, or alone may, or are preferred: on a few rows of many.

All change fp32 logits [S, V] in place, and take pairs of a row [N] int64 and a token [N] int64.
"""

import torch

NEVER = float("-inf")


def forbid(logits: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> None:
    """The tokens are never sampled."""
    logits[row, token] = NEVER


def allow_only(
    logits: torch.Tensor, rows: torch.Tensor, row: torch.Tensor, token: torch.Tensor
) -> None:
    """In ``rows`` [M] int64 nothing is sampled but the tokens of the pairs, which are of them."""
    kept = logits[row, token]
    logits[rows] = NEVER
    logits[row, token] = kept


def add_bias(
    logits: torch.Tensor, row: torch.Tensor, token: torch.Tensor, bias: torch.Tensor
) -> None:
    """``bias`` [N] fp32 is added; no pair may be there twice."""
    logits[row, token] += bias

"""Penalties on tokens that a request has already used, as vLLM and the OpenAI API define them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class UsedTokens:
    """N pairs of a row and a token that its request has used, no pair twice, on one device.

    As many as the requests have different tokens: a table over the vocabulary would have to be
    read and written as a whole at every step.
    """

    row: torch.Tensor  # [N] int64
    token: torch.Tensor  # [N] int64
    count: torch.Tensor  # [N] int64, how often it was generated; 0 for a token of the prompt alone
    repetition: torch.Tensor  # [N] fp32, of the row; 1 is off
    presence: torch.Tensor  # [N] fp32, of the row; 0 is off
    frequency: torch.Tensor  # [N] fp32, of the row; 0 is off


def apply_penalties(logits: torch.Tensor, used: UsedTokens) -> None:
    """Lower (or with negative penalties raise) the logits of used tokens, in place: [S, V] fp32.

    Repetition divides positive logits and multiplies negative ones (Keskar et al., 2019, "CTRL").
    Presence is subtracted once from a generated token, frequency once for each time.
    """
    values = logits[used.row, used.token]
    repeated = torch.where(values > 0, values / used.repetition, values * used.repetition)
    once = used.presence * (used.count > 0)
    logits[used.row, used.token] = repeated - used.frequency * used.count - once

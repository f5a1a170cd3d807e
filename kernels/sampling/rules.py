"""Rules on logits as lists of tokens on the device: the layout that kernels of a GPU read."""

from dataclasses import dataclass, fields

import torch

USED = 1  # kinds of a token in a list, which may be of several
ALLOWED = 2
BANNED = 4
BANNED_EARLY = 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """What changes the logits of S rows: a list of tokens for each, in E places that all share.

    Sampled tokens that are counted lengthen a list: whoever lays them out leaves room.
    """

    first: torch.Tensor  # [S] int32, where the row's list begins
    length: torch.Tensor  # [S] int32, 0 = the row stays as it is, unless it is restricted
    restricted: torch.Tensor  # [S] int32, 1 = only tokens of kind ALLOWED may be sampled
    counted: torch.Tensor  # [S] int32, 1 = what the row samples is counted
    banned_until: torch.Tensor  # [S] int64, the first position at which BANNED_EARLY tokens may be
    repetition: torch.Tensor  # [S] fp32, 1 is off
    presence: torch.Tensor  # [S] fp32, 0 is off
    frequency: torch.Tensor  # [S] fp32, 0 is off
    token: torch.Tensor  # [E] int32, none twice in a list
    count: torch.Tensor  # [E] int32, how often it was generated
    kind: torch.Tensor  # [E] int32, a sum of the kinds; USED = penalties apply
    bias: torch.Tensor  # [E] fp32

    def rows(self, count: int) -> "TokenRules":
        """Those of the first ``count`` rows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return TokenRules(
            **{
                name: value if name in PER_ENTRY else value[:count]
                for name, value in values.items()
            }
        )


PER_ENTRY = ("token", "count", "kind", "bias")
"""The fields of `TokenRules` that are of all lists together."""

"""Log probabilities of a step's tokens, for the rows that ask for them."""

import numpy as np
import torch

from rayfin.actors.messages import Int32Array, Int64Array, Logprobs
from rayfin.kernels.sampling.logprobs import top_logprobs


class LogprobsCollector:
    """Gathers what the steps of one call have to tell.

    Args:
        most: K of the message: the likeliest tokens told beside each one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: list[Int64Array] = []
        self._parts: list[tuple[torch.Tensor, ...]] = []  # chosen, top ids, top values, rank

    def add(self, places: Int64Array, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """The model's raw ``logits`` [N, V] of ``tokens`` [N], with their places in the result."""
        self._places.append(places)
        self._parts.append(top_logprobs(logits, tokens, self._most))

    def message(self) -> Logprobs | None:
        """What was gathered, in the order of the places; None if that is nothing."""
        if not self._places:
            return None
        at = np.concatenate(self._places)
        order = np.argsort(at)
        chosen, ids, values, rank = (
            torch.cat(column).cpu().numpy()[order] for column in zip(*self._parts, strict=True)
        )
        narrow: Int32Array = ids.astype(np.int32)
        return Logprobs(at[order].astype(np.int32), chosen, rank.astype(np.int32), narrow, values)

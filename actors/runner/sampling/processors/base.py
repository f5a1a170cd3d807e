"""The contract of a logits processor, and what every one of them shares.

A processor is one file of this folder: token rules, penalties, one day a grammar. It keeps state by
slot for the requests that need it, and changes the logits of their rows before they are sampled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rayfin.actors.messages import Int64Array, NewRequest
from rayfin.actors.runner.sampling.processors.device_rules import DeviceRules
from rayfin.kernels.staging import to_device


@dataclass(frozen=True, slots=True)
class Rows:
    """The N rows of a step's logits that a processor changes."""

    index: list[int]  # [N] rows of the logits
    slots: list[int]  # [N] slot of each row's request
    positions: list[int]  # [N] position of the token that each row is about to sample


class LogitsProcessor(Protocol):
    """Changes logits by request. All calls are made in the order of the steps.

    ``accept`` and ``rollback`` keep its state equal to the request's tokens, so that a state is a
    function of the token log alone: ``add`` with a longer history gives the same state.
    """

    def add(self, slot: int, request: NewRequest) -> bool:
        """Starts a request with the tokens of its history; False if it needs nothing of this."""
        ...

    def remove(self, slot: int) -> None:
        """Drops the slot's request, which ``add`` accepted."""

    def is_active(self, slot: int, position: int) -> bool:
        """Whether ``apply`` changes the row that samples the token at ``position``."""
        ...

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        """Changes the ``rows`` of fp32 logits [S, V] in place, and no others."""

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        """Appends sampled tokens to the slot's request."""

    def rollback(self, slot: int, count: int) -> None:
        """Takes back the last ``count`` accepted tokens: their step is computed again."""

    def device_rules(self, slot: int) -> DeviceRules | None:
        """The slot's rules as lists that a GPU applies in a CUDA graph, or None if it needs the
        host at every token: then its row runs outside of the graphs."""
        ...


class ProcessorFactory(Protocol):
    """A processor's class: made anew when the runner starts."""

    def __call__(self, device: torch.device) -> LogitsProcessor: ...


def token_pairs(
    rows: Iterable[tuple[int, Sequence[int] | Int64Array]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [N], tokens [N]) of the tokens of each row."""
    listed = list(rows)
    lengths = [len(tokens) for _, tokens in listed]
    index = np.repeat(np.array([row for row, _ in listed], np.int64), lengths)
    tokens = np.concatenate([np.asarray(tokens, np.int64) for _, tokens in listed])
    return to_device(index, device), to_device(tokens, device)


def float_tensor(values: Any, device: torch.device) -> torch.Tensor:
    return to_device(np.asarray(values, np.float32), device)

"""The contract of a logits processor, and what every one of them shares.

A processor is one file: token rules, penalties, grammars. It keeps state by slot for the requests
that need it, and changes the logits of their rows before they are sampled. A masker does not change
them: it says which tokens the rows may sample.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import Int64Array, NewRequest
from rayfin.actors.parts import PartUsage
from rayfin.actors.runner.sampling.device_rules import DeviceRules
from rayfin.kernels.shapes import TokenBits, to_device


@dataclass(frozen=True, slots=True)
class Rows:
    """The N rows of a step's logits that a processor changes."""

    index: list[int]  # [N] rows of the logits
    slots: list[int]  # [N] slot of each row's request
    positions: list[int]  # [N] position of the token that each row is about to sample


class SlotRules(Protocol):
    """Rules on the tokens of the requests that need them. Calls come in the order of the steps.

    ``accept`` and ``rollback`` keep its state equal to the request's tokens, so that a state is a
    function of the token log alone: ``add`` with a longer history gives the same state.
    """

    def add(self, slot: int, request: NewRequest) -> bool:
        """Starts a request with the tokens of its history; False if it needs nothing of this."""
        ...

    def remove(self, slot: int) -> None:
        """Drops the slot's request, which ``add`` accepted."""

    def is_active(self, slot: int, position: int) -> bool:
        """Whether the row that samples the token at ``position`` is changed."""
        ...

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        """Appends sampled tokens to the slot's request."""

    def rollback(self, slot: int, count: int) -> None:
        """Takes back the last ``count`` accepted tokens: their step is computed again."""

    def device_rules(self, slot: int) -> DeviceRules | None:
        """The slot's rules as lists that a GPU applies in a CUDA graph, or None if it needs the
        host at every token: then its row runs outside of the graphs."""
        ...


class LogitsProcessor(SlotRules, Protocol):
    """Changes logits by request."""

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        """Changes the ``rows`` of fp32 logits [S, V] in place, and no others."""


@dataclass(frozen=True, slots=True)
class Masks:
    """What some rows of a step's logits may sample, and which of them cannot go on."""

    allowed: TokenBits
    errors: dict[int, RequestFailed]  # by row of the logits; it may sample nothing


@runtime_checkable
class TokenMasker(SlotRules, Protocol):
    """Allows tokens as bits beside the logits, which stay as they are: no copy is made.

    Only requests with parts are shown to it.
    """

    def begin_step(self) -> None:
        """A step begins that has requests of it, before any other call of that step."""

    def masks(self, rows: Rows, vocabulary: int) -> Masks:
        """The tokens that the ``rows`` of logits [S, vocabulary] may sample."""
        ...

    def take_usage(self) -> PartUsage | None:
        """What was done since the last call, or None if it is nothing."""
        ...


class ProcessorFactory(Protocol):
    """A processor's class: made anew when the runner starts."""

    def __call__(self, device: torch.device) -> LogitsProcessor | TokenMasker: ...


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

"""The contract of a proposer: who guesses how requests go on."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rayfin.actors.messages import Int32Array, Int64Array, NewRequest
from rayfin.actors.runner.parts.model_part import ModelPart


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for N slots."""

    tokens: Int32Array  # [N, K]
    lengths: Int64Array  # [N] how many of the K each slot has, possibly none
    trust: Int64Array | None = None  # [N] a class in [0, TRUST_CLASSES): drafts of one class are
    # right about as often, a higher one more often; None: all are of class 0


TRUST_CLASSES = 8


class Proposer(Protocol):
    """Guesses how requests go on: n-grams, a draft model, heads of the model."""

    def add(self, slot: int, request: NewRequest) -> None:
        """Starts a request with the tokens of its history."""

    def remove(self, slot: int) -> None:
        """Drops the slot's request."""

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """Appends the first ``counts`` [N] of the ``tokens`` [N, W] to the ``slots`` [N]."""

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        """Guesses at most ``room`` [N] next tokens of the ``slots`` [N]."""
        ...


@runtime_checkable
class Stepping(Protocol):
    """Of a proposer that computes a step for each token of a draft."""

    def seconds(self, rows: int) -> float:
        """How long a step of ``rows`` takes."""
        ...


class TokenTable:
    """The tokens of the requests in S slots, for proposers that read them."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.tokens: Int32Array = np.zeros((num_slots, max_len), np.int32)
        self.lengths: Int64Array = np.zeros(num_slots, np.int64)

    def add(self, slot: int, history: Int32Array) -> None:
        """Starts a request with its tokens [N]."""
        self.tokens[slot, : len(history)] = history
        self.lengths[slot] = len(history)

    def remove(self, slot: int) -> None:
        self.lengths[slot] = 0

    def append(self, slots: Int64Array, tokens: Int32Array) -> None:
        """Appends a token [N] to each of the slots [N], which are different."""
        places = np.minimum(self.lengths[slots], self.tokens.shape[1] - 1)
        self.tokens[slots, places] = tokens
        self.lengths[slots] = places + 1

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """Appends the first ``counts`` [N] of the ``tokens`` [N, W] to the ``slots`` [N]."""
        for column in range(int(counts.max(initial=0))):
            more = counts > column
            self.append(slots[more], tokens[more, column])

    def before(self, slots: Int64Array, ends: Int64Array, n: int) -> Int32Array:
        """The ``n`` tokens [N, n] before ``ends`` [N], each at least n, in the slots [N]."""
        index = ends[:, None] + np.arange(-n, 0)
        tokens: Int32Array = self.tokens[slots[:, None], index]
        return tokens

    def last(self, slots: Int64Array, n: int) -> Int32Array:
        """The last ``n`` tokens [N, n] of the slots [N], the last one first; shorter texts are
        filled up with their first token."""
        index = np.maximum(self.lengths[slots][:, None] - np.arange(1, n + 1), 0)
        tokens: Int32Array = self.tokens[slots[:, None], index]
        return tokens

    def after(self, slots: Int64Array, places: Int64Array, count: int) -> Int32Array:
        """Returns ``count`` tokens [N, count] from ``places`` [N] on, each below its slot's length.

        Where a text ends it goes on with what is from there: a loop is guessed as a loop.
        """
        period = np.maximum(self.lengths[slots] - places, 1)[:, None]
        index = places[:, None] + np.arange(count) % period
        drafts: Int32Array = self.tokens[slots[:, None], index]
        return drafts


class DraftPart(ModelPart):
    """What a draft model or head adds to a model: layers of the cache behind the others.

    Args:
        token_layers: of the cache, in front of its own.
        bytes_per_request: of the states that wait for a head.
        gpu_model: a draft model that CUDA graphs can record, or None.
    """

    def __init__(
        self,
        token_layers: int,
        bytes_per_request: int = 0,
        gpu_model: Any = None,
    ) -> None:
        self.token_layers = token_layers
        self.bytes_per_request = bytes_per_request
        self.gpu_model = gpu_model

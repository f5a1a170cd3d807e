"""Rules on logits for the rows of a lease, as the lists of tokens that go to a GPU once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayfin.actors.messages import Int32Array, Int64Array, Sampling
from rayfin.kernels.shapes import ALLOWED, BANNED, BANNED_EARLY, USED

# The different tokens of one request, with how often it has generated each.

GROWTH = 64  # places; there are twice as many when they run out


class TokenCounts:
    """Grows by a token at a time, and is read as arrays at each step."""

    def __init__(self, prompt: Int32Array, output: Int32Array) -> None:
        tokens, first = np.unique(np.concatenate([prompt, output]), return_inverse=True)
        self._tokens: Int64Array = np.zeros(len(tokens) + GROWTH, np.int64)
        self._counts: Int64Array = np.zeros(len(tokens) + GROWTH, np.int64)
        self._tokens[: len(tokens)] = tokens
        np.add.at(self._counts, first[len(prompt) :], 1)
        self._place = {token: i for i, token in enumerate(tokens.tolist())}

    def __len__(self) -> int:
        return len(self._place)

    @property
    def tokens(self) -> Int64Array:
        """[N], in no order."""
        return self._tokens[: len(self)]

    @property
    def counts(self) -> Int64Array:
        """[N] how often each was generated: 0 for one of the prompt alone."""
        return self._counts[: len(self)]

    def add(self, token: int) -> None:
        """The token was generated."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            more = np.zeros(len(self._tokens), np.int64)
            self._tokens = np.concatenate([self._tokens, more])
            self._counts = np.concatenate([self._counts, more])
        self._tokens[place] = token
        self._counts[place] += 1


Numbers = npt.NDArray[Any]


class Ruled(NamedTuple):
    """A row that has rules, and the tokens that penalties look at, if it has any."""

    row: int
    sampling: Sampling
    used: TokenCounts | None


@dataclass(frozen=True, slots=True)
class RowTokenRules:
    """`kernels.sampling.rules.TokenRules` on the host, for the R rows of a lease."""

    arrays: dict[str, Numbers]  # by the names of its fields, [R] or [E]
    needs_host: bool  # a rule looks at more than the next token: steps run one by one

    @property
    def entries(self) -> int:
        """E, room for the lease's own tokens included."""
        return len(self.arrays["token"])


@dataclass(slots=True)
class _TokenList:
    """One row's: N tokens, none twice, with what is known of each."""

    token: Int64Array
    count: Int64Array
    kind: Int64Array
    bias: npt.NDArray[np.float32]


def make_row_token_rules(rows: int, ruled: Sequence[Ruled], num_steps: int) -> RowTokenRules:
    """The lists of the ``ruled`` rows, each with room for ``num_steps`` more tokens if counted."""
    lists = [_list_of(own.sampling, own.used) for own in ruled]
    room = [
        len(tokens.token) + (num_steps if own.used is not None else 0)
        for own, tokens in zip(ruled, lists, strict=True)
    ]
    places = np.cumsum(room) - room
    arrays: dict[str, Numbers] = {
        **{name: np.zeros(rows, np.int32) for name in ("first", "length", "restricted", "counted")},
        "banned_until": np.zeros(rows, np.int64),
        "repetition": np.ones(rows, np.float32),
        "presence": np.zeros(rows, np.float32),
        "frequency": np.zeros(rows, np.float32),
        **{name: np.zeros(sum(room), np.int32) for name in ("token", "count", "kind")},
        "bias": np.zeros(sum(room), np.float32),
    }
    for own, tokens, place in zip(ruled, lists, places.tolist(), strict=True):
        row, sampling, count = own.row, own.sampling, len(tokens.token)
        arrays["first"][row], arrays["length"][row] = place, count
        arrays["restricted"][row] = bool(sampling.allowed)
        arrays["counted"][row] = own.used is not None
        arrays["banned_until"][row] = sampling.banned_until
        arrays["repetition"][row] = sampling.repetition_penalty
        arrays["presence"][row] = sampling.presence_penalty
        arrays["frequency"][row] = sampling.frequency_penalty
        for name in ("token", "count", "kind", "bias"):
            arrays[name][place : place + count] = getattr(tokens, name)
    words = (word for own in ruled for word in own.sampling.bad_words)
    return RowTokenRules(arrays, needs_host=any(len(word) > 1 for word in words))


def _list_of(sampling: Sampling, used: TokenCounts | None) -> _TokenList:
    none = np.zeros(0, np.int64)
    tokens, counts = (none, none) if used is None else (used.tokens, used.counts)
    bare = [word[0] for word in sampling.bad_words if len(word) == 1]
    biased = [token for token, _ in sampling.logit_bias]
    parts = [
        (USED, tokens),
        (ALLOWED, np.array(sampling.allowed, np.int64)),
        (BANNED, np.array(bare, np.int64)),
        (BANNED_EARLY, np.array(sampling.banned, np.int64)),
        (0, np.array(biased, np.int64)),
    ]
    if not any(len(listed) for _, listed in parts[1:]):  # as good as always, and nothing to merge
        return _TokenList(
            tokens, counts, np.full(len(tokens), USED), np.zeros(len(tokens), np.float32)
        )
    merged, place = np.unique(np.concatenate([listed for _, listed in parts]), return_inverse=True)
    kind, count = np.zeros(len(merged), np.int64), np.zeros(len(merged), np.int64)
    bias = np.zeros(len(merged), np.float32)
    kinds = np.repeat([one for one, _ in parts], [len(listed) for _, listed in parts])
    np.bitwise_or.at(kind, place, kinds)
    count[place[: len(tokens)]] = counts
    bias[place[len(place) - len(biased) :]] = [value for _, value in sampling.logit_bias]
    return _TokenList(merged, count, kind, bias)

"""Rules on logits as lists of tokens that a GPU applies in a CUDA graph, uploaded once a call."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rayfin.actors.messages import Int32Array, Int64Array
from rayfin.kernels.shapes import ALLOWED, BANNED, BANNED_EARLY, USED

GROWTH = 64  # places of a TokenCounts; there are twice as many when they run out


class TokenCounts:
    """The distinct tokens of one request, with how often it has generated each.

    Grows by a token at a time, and is read as arrays at each step.
    """

    def __init__(self, prompt: Int32Array, output: Int32Array) -> None:
        tokens, first = np.unique(np.concatenate([prompt, output]), return_inverse=True)
        self._tokens: Int64Array = np.zeros(len(tokens) + GROWTH, np.int64)
        self._counts: Int64Array = np.zeros(len(tokens) + GROWTH, np.int64)
        self._tokens[: len(tokens)] = tokens
        np.add.at(self._counts, first[len(prompt) :], 1)
        self._place = {token: i for i, token in enumerate(tokens.tolist())}
        self._from_history = len(tokens)
        self._added: list[int] = []

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
        """Counts a generated token."""
        self._added.append(token)
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            more = np.zeros(len(self._tokens), np.int64)
            self._tokens = np.concatenate([self._tokens, more])
            self._counts = np.concatenate([self._counts, more])
        self._tokens[place] = token
        self._counts[place] += 1

    def rollback(self, count: int) -> None:
        """Takes back the last ``count`` tokens of ``add``."""
        for _ in range(count):
            token = self._added.pop()
            place = self._place[token]
            self._counts[place] -= 1
            if not self._counts[place] and place >= self._from_history:
                del self._place[token]  # it was added last, so its place is the last one


Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """One slot's rules, as `LogitsProcessor.device_rules` gives them."""

    allowed: tuple[int, ...] = ()  # the only tokens that may be sampled; () is all
    banned: tuple[int, ...] = ()
    banned_early: tuple[int, ...] = ()  # at positions below ``banned_until``
    banned_until: int = 0
    bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    used: TokenCounts | None = None  # with penalties
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def leaves_none(self, position: int) -> bool:
        """Whether all tokens that are allowed are banned at a position as well."""
        early = self.banned_early if position < self.banned_until else ()
        return bool(self.allowed) and not set(self.allowed).difference(self.banned, early)

    def merged(self, other: "DeviceRules") -> "DeviceRules | None":
        """These rules and those that ``other`` sets, or None if both set the same field."""
        default = DeviceRules()
        pairs = ((field.name, getattr(other, field.name)) for field in fields(DeviceRules))
        changes = {name: value for name, value in pairs if value != getattr(default, name)}
        if any(getattr(self, name) != getattr(default, name) for name in changes):
            return None
        return replace(self, **changes) if changes else self


@dataclass(frozen=True, slots=True)
class RowTokenRules:
    """`kernels.shapes.RuleTensors` on the host, for the R rows of a call."""

    arrays: dict[str, Numbers]  # by the names of its fields, [R] or [E]

    @property
    def entries(self) -> int:
        """E, room for the call's own tokens included."""
        return len(self.arrays["token"])


@dataclass(slots=True)
class _TokenList:
    """One row's: N tokens, none twice, with what is known of each."""

    token: Int64Array
    count: Int64Array
    kind: Int64Array
    bias: npt.NDArray[np.float32]


def make_row_token_rules(
    rows: int, by_row: Mapping[int, DeviceRules], num_steps: int
) -> RowTokenRules:
    """The lists of the rows with rules, each with room for ``num_steps`` more tokens if counted."""
    lists = [_list_of(rules) for rules in by_row.values()]
    room = [
        len(tokens.token) + (num_steps if rules.used is not None else 0)
        for rules, tokens in zip(by_row.values(), lists, strict=True)
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
    for (row, rules), tokens, place in zip(by_row.items(), lists, places.tolist(), strict=True):
        count = len(tokens.token)
        arrays["first"][row], arrays["length"][row] = place, count
        arrays["restricted"][row] = bool(rules.allowed)
        arrays["counted"][row] = rules.used is not None
        for name in ("banned_until", "repetition", "presence", "frequency"):
            arrays[name][row] = getattr(rules, name)
        for name in ("token", "count", "kind", "bias"):
            arrays[name][place : place + count] = getattr(tokens, name)
    return RowTokenRules(arrays)


def _list_of(rules: DeviceRules) -> _TokenList:
    used = rules.used
    none = np.zeros(0, np.int64)
    tokens, counts = (none, none) if used is None else (used.tokens, used.counts)
    biased = [token for token, _ in rules.bias]
    parts = [
        (USED, tokens),
        (ALLOWED, np.array(rules.allowed, np.int64)),
        (BANNED, np.array(rules.banned, np.int64)),
        (BANNED_EARLY, np.array(rules.banned_early, np.int64)),
        (0, np.array(biased, np.int64)),
    ]
    if not any(len(listed) for _, listed in parts[1:]):  # nearly always, and nothing to merge
        return _TokenList(
            tokens, counts, np.full(len(tokens), USED), np.zeros(len(tokens), np.float32)
        )
    merged, place = np.unique(np.concatenate([listed for _, listed in parts]), return_inverse=True)
    kind, count = np.zeros(len(merged), np.int64), np.zeros(len(merged), np.int64)
    bias = np.zeros(len(merged), np.float32)
    kinds = np.repeat([one for one, _ in parts], [len(listed) for _, listed in parts])
    np.bitwise_or.at(kind, place, kinds)
    count[place[: len(tokens)]] = counts
    bias[place[len(place) - len(biased) :]] = [value for _, value in rules.bias]
    return _TokenList(merged, count, kind, bias)

"""A step's message, taken apart by request."""

import numpy as np

from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import Ended, TokenDelta, TokenDeltas
from rayfin.deployments.deltas import split_deltas

NAMES = {1: "a", 2: "b", 3: "c"}


def message(pairs: list[tuple[int, int]], *ended: Ended) -> TokenDeltas:
    keys = np.array([key for key, _ in pairs], np.int64)
    return TokenDeltas(0, 0, keys, np.array([t for _, t in pairs], np.int32), list(ended))


def test_tokens_and_ends_meet() -> None:
    news = message([(1, 10), (2, 20), (1, 11)], Ended(2, "stop", 20), Ended(3, "abort"))
    assert dict(split_deltas(news, NAMES)) == {
        1: TokenDelta("a", [10, 11]),
        2: TokenDelta("b", [20], "stop", 20),
        3: TokenDelta("c", [], "abort"),
    }


def test_strangers_and_failures_have_no_delta() -> None:
    news = message([(9, 1), (1, 10)], Ended(9, "stop"), Ended(1, "error", error=RequestFailed("x")))
    assert dict(split_deltas(news, NAMES)) == {}
    assert dict(split_deltas(message([]), NAMES)) == {}


def test_tokens_are_plain_integers() -> None:
    ((_, delta),) = split_deltas(message([(1, 10)]), NAMES)
    assert type(delta.tokens[0]) is int

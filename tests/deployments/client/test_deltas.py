"""A step's message, taken apart by request."""

import numpy as np

from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import Begun, Ended, Logprobs, TokenDelta, TokenDeltas, TokenLogprob
from rayfin.deployments.client.deltas import WholeDeltas, split_deltas

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


def test_times_of_first_tokens() -> None:
    news = message([(1, 10), (2, 20)], Ended(2, "stop", queued=3.0, first_token=4.0))
    begun = {1: Begun(0.25, 0.5, 7), 2: Begun(3.0, 4.0, 8), 9: Begun(1.0, 1.0, 9)}
    news.begun = begun
    deltas = dict(split_deltas(news, NAMES))
    assert (deltas[1].queued, deltas[1].first_token, deltas[1].cached_tokens) == begun[1]
    assert (deltas[2].queued, deltas[2].first_token) == (3.0, 4.0)


def test_tokens_are_plain_integers() -> None:
    ((_, delta),) = split_deltas(message([(1, 10)]), NAMES)
    assert type(delta.tokens[0]) is int


def test_logprobs_go_with_their_tokens() -> None:
    """K is cut to what is there, and a request that asks for none has none."""
    message = TokenDeltas(1, 2, np.array([7, 8, 7]), np.array([1, 2, 3], np.int32))
    message.logprobs = Logprobs(
        at=np.array([0, 2], np.int32),
        chosen=np.array([-0.5, -1.5], np.float32),
        rank=np.array([1, 4], np.int32),
        ids=np.array([[1, 5], [9, -1]], np.int32),
        values=np.array([[-0.5, -2.0], [-0.25, -np.inf]], np.float32),
    )
    message.prompt_logprobs = {8: message.logprobs}
    deltas = dict(split_deltas(message, {7: "r7", 8: "r8"}))
    assert deltas[7].tokens == [1, 3]
    assert deltas[7].logprobs == [
        TokenLogprob(-0.5, 1, ((1, -0.5), (5, -2.0))),
        TokenLogprob(-1.5, 4, ((9, -0.25),)),
    ]
    assert deltas[8].logprobs is None and deltas[7].prompt_logprobs == {}
    assert deltas[8].prompt_logprobs[2].logprob == -1.5


def test_whole_deltas_come_at_the_end() -> None:
    """With all tokens; strangers and failures have none."""
    whole = WholeDeltas(NAMES)
    assert not list(whole.push(message([(1, 10), (2, 20), (9, 90)])))
    assert dict(whole.push(message([(1, 11), (2, 21)], Ended(2, "stop", 21, cached_tokens=4)))) == {
        2: TokenDelta("b", [20, 21], "stop", 21, cached_tokens=4)
    }
    failed = Ended(3, "error", error=RequestFailed("x"))
    assert dict(whole.push(message([(1, 12)], Ended(1, "length"), failed, Ended(9, "stop")))) == {
        1: TokenDelta("a", [10, 11, 12], "length")
    }

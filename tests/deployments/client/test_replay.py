"""What a request asks the next engine for when it has lost one."""

import numpy as np
import pytest

from rayfin.actors.errors import DeadlineExceeded
from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta, TokenLogprob
from rayfin.deployments.client.replay import KEY_MASK, Replay

SCORE = TokenLogprob(-1.0, 1)


def source(**settings: object) -> EngineRequest:
    return EngineRequest(
        "r",
        np.array([1, 2, 3], np.int32),
        Sampling(seed=5, prompt_logprobs=0),
        StopRules(9),
        key=KEY_MASK - 1,
        **settings,  # type: ignore[arg-type]
    )


def test_first_attempt_is_the_request_itself() -> None:
    request = source(timeout=3.0, parent_key=7)
    assert Replay(request, 10.0).attempt(10.0) == request


def test_tokens_and_time_so_far() -> None:
    request = source(timeout=3.0, output=[8])  # an answer that is continued
    replay = Replay(request, 10.0)
    first = replay.attempt(10.0)
    replay.accept(TokenDelta("r", [4]), 10.5)
    replay.accept(TokenDelta("r", [5, 6]), 10.6)
    second = replay.attempt(12.0)
    assert second.output == [8, 4, 5, 6] and first.output == request.output == [8]
    assert second.timeout == 1.0
    assert (second.request_id, second.sampling, second.stopping) == (
        "r",
        first.sampling,
        StopRules(9),
    )
    with pytest.raises(DeadlineExceeded, match="timeout of 3 s"):
        replay.attempt(13.0)


def test_keys_are_new_and_siblings_meet() -> None:
    fork_parent, younger = source(), source(parent_key=KEY_MASK - 1)
    younger.key = 3
    replays = [Replay(fork_parent, 0.0), Replay(younger, 0.0)]
    keys = set()
    for _ in range(5):
        first, second = (replay.attempt(0.0) for replay in replays)
        assert second.parent_key == first.key
        keys |= {first.key, second.key}
    assert len(keys) == 10 and all(0 <= key <= KEY_MASK for key in keys)


def test_prompt_is_told_of_once() -> None:
    replay = Replay(source(), 0.0)
    replay.attempt(0.0)
    assert replay.accept(TokenDelta("r", [], prompt_logprobs={1: SCORE}), 0.0).prompt_logprobs
    again = replay.attempt(0.0)
    assert again.sampling.prompt_logprobs == 0
    delta = replay.accept(TokenDelta("r", [], prompt_logprobs={1: SCORE, 2: SCORE}), 0.0)
    assert delta.prompt_logprobs == {2: SCORE}
    assert replay.attempt(0.0).sampling == Sampling(seed=5)  # there is nothing left to tell


def test_cached_tokens_are_of_the_prompt() -> None:
    replay = Replay(source(), 0.0)
    replay.attempt(0.0)
    assert replay.accept(TokenDelta("r", [4], "length", cached_tokens=2), 0.0).cached_tokens == 2
    replay.attempt(0.0)
    assert replay.accept(TokenDelta("r", [4], "length", cached_tokens=7), 0.0).cached_tokens == 3


def test_only_deaths_in_a_row_count() -> None:
    replay = Replay(source(), 0.0)
    assert replay.attempt(0.0).deaths == 0
    replay.died()
    assert replay.attempt(0.0).deaths == 1
    replay.died()
    assert replay.attempt(0.0).deaths == 2
    replay.accept(TokenDelta("r", [4]), 0.0)
    replay.died()
    assert replay.attempt(0.0).deaths == 1


def test_waiting_is_counted_from_the_loss() -> None:
    replay = Replay(source(), 1.0)
    assert replay.waiting_since == 1.0
    replay.attempt(2.0)
    replay.accept(TokenDelta("r", [4]), 5.0)
    replay.lost(6.0)
    replay.attempt(7.0)
    replay.lost(8.0)  # nothing came in between
    assert replay.waiting_since == 6.0
    replay.attempt(9.0)
    replay.accept(TokenDelta("r", [5]), 10.0)
    replay.lost(11.0)
    assert replay.waiting_since == 11.0

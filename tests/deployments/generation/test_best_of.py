"""The likeliest choices, by a fake's word for it."""

from dataclasses import replace

import numpy as np
import pytest

from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta, TokenLogprob
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.best_of import (
    Likelihood,
    candidates,
    likeliest,
    request_logprobs,
)


def _delta(*logprobs: float) -> TokenDelta:
    entries = [TokenLogprob(value, 1) for value in logprobs]
    return TokenDelta("r", list(range(len(entries))), logprobs=entries)


def test_per_token_over_all_deltas() -> None:
    own = Likelihood()
    own.add(_delta(-1.0, -2.0), 2)
    own.add(_delta(-3.0), 1)
    assert own.per_token == pytest.approx(-2.0)


def test_tokens_past_a_stop_string_do_not_count() -> None:
    own = Likelihood()
    own.add(_delta(-1.0, -9.0, -9.0), 1)
    assert own.per_token == -1.0


def test_nothing_said_is_the_least_likely() -> None:
    silent, spoken = Likelihood(), Likelihood(-50.0, 1)
    assert likeliest([silent, spoken], 2) == [1, 0]


def test_best_first_and_the_earlier_one_among_equals() -> None:
    entries = [Likelihood(-6.0, 3), Likelihood(-1.0, 1), Likelihood(-9.0, 9), Likelihood(-2.0, 1)]
    assert likeliest(entries, 3) == [1, 2, 0]
    assert likeliest(entries, 4) == [1, 2, 0, 3]


def test_candidates() -> None:
    params = SamplingParams(n=2, best_of=5, temperature=0.7)
    assert candidates(params) == replace(params, n=5, best_of=None)


def test_what_the_caller_asks_for_stays() -> None:
    prompt = np.array([1], np.int32)
    requests = [
        EngineRequest(str(asked), prompt, Sampling(logprobs=asked), StopRules(1))
        for asked in (None, 0, 4)
    ]
    request_logprobs(requests)
    assert [request.sampling.logprobs for request in requests] == [0, 0, 4]

"""Speculation changes no token and no log probability, whatever rules a request has."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rayfin.actors.messages import Sampling
from rayfin.actors.runner.execution.draft_steps import DraftSteps
from spec_checks import RULES, known_future, requests_of, ruled, run, speculating
from tiers import few

Make = Callable[..., Any]


@pytest.mark.parametrize("rule", RULES)
def test_equal_over_every_rule(
    rule: str, tiny_model: Make, engine_args: Make, tiny_tokenizer: Make
) -> None:
    tokenizer = str(tiny_tokenizer("byte_level"))
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24, tokenizer=tokenizer)
    requests = ruled(rule)
    expected, _ = run(args, requests)
    assert all(expected[0].values())
    for method in ("ngram", "suffix"):
        assert run(speculating(args, method=method), requests)[0] == expected
    for right in (1.0, 0.0, 0.6):
        actual, engine = run(
            args, requests, known_future(expected, right), num_speculative_tokens=3
        )
        assert actual == expected
        stats = engine.stats()
        assert stats.spec_drafts and (stats.spec_accepted_tokens > 0) == (right > 0)
        assert stats.spec_accepted_tokens == sum(stats.spec_accepted_by_position.values())


@pytest.mark.slow(reason="many engines")
@pytest.mark.parametrize(
    ("name", "most", "lease"),
    few(
        [
            (name, *sizes)
            for number, name in enumerate(("qwen3", "olmo2", "gemma2", "llama"))
            for sizes in [((1, 1), (8, 1), (5, 3), (2, 8))[number - at] for at in range(4)]
        ],
        5,
    ),
)
def test_equal_on_other_models(
    name: str, most: int, lease: int, tiny_model: Make, engine_args: Make
) -> None:
    args = engine_args(tiny_model(name).folder, max_decoding_batch=24)
    for rule in ("greedy", "seeded", "logprobs", "repetition_penalty"):
        requests = ruled(rule, 40)
        expected, _ = run(args, requests)
        future = known_future(expected, 0.8)
        for steps in (1, 2):
            more = {"num_speculative_tokens": most, "steps_in_flight": steps, "max_lease": lease}
            assert run(args, requests, future, **more)[0] == expected
        own = speculating(args, num_speculative_tokens=most, adaptive=True)
        assert run(own, requests, max_lease=lease)[0] == expected


@pytest.mark.parametrize("where", range(1, 8))
def test_ends_within_a_draft(where: int, tiny_model: Make, engine_args: Make) -> None:
    """At a stop token, at max_tokens, and at the end of the context."""
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24)
    free, _ = run(args, requests_of(Sampling(temperature=1.2)))
    future = known_future(free)
    stop = (free[0][1][where],)
    for requests in (
        requests_of(Sampling(temperature=1.2), stop=stop),
        requests_of(Sampling(temperature=1.2), max_tokens=where),
    ):
        expected, _ = run(args, requests)
        actual, _ = run(args, requests, future, num_speculative_tokens=5)
        assert actual == expected and actual[0] != free[0]
    short = replace(args, max_model_len=9 + where)
    requests = requests_of(Sampling(temperature=1.2), max_tokens=where)
    assert run(short, requests, future, num_speculative_tokens=5)[0] == expected


def test_choices_and_preemption(tiny_model: Make, engine_args: Make) -> None:
    """n > 1 forks from a prompt; short of pages requests are preempted, and pages agree."""
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24, check_pages=True)
    sampling = Sampling(temperature=1.0, repetition_penalty=1.1)
    requests = requests_of(sampling, 24)
    for number in range(3):
        fork = replace(requests[1], key=10 + number, request_id=f"c{number}", parent_key=1)
        requests.append(replace(fork, sampling=replace(sampling, seed=10 + number)))
    expected, _ = run(args, requests)
    free, engine = run(speculating(args), requests)
    assert free == expected and engine.stats().spec_drafts
    actual, engine = run(speculating(args), requests, num_pages=9)
    assert actual == expected and engine.stats().preemptions


def test_goes_on_from_another_engine(tiny_model: Make, engine_args: Make) -> None:
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24)
    requests = requests_of(Sampling(temperature=0.8, frequency_penalty=0.5))
    expected, _ = run(args, requests)
    for cut in (1, 7):
        rest = [replace(own, output=expected[0][own.key][:cut]) for own in requests]
        actual, _ = run(speculating(args), rest)
        assert {k: expected[0][k][:cut] + v for k, v in actual[0].items()} == expected[0]


def test_a_row_that_fails_fails_alone(
    tiny_model: Make, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with drafts that raises runs without them."""
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24)
    requests = requests_of(Sampling())
    expected, _ = run(args, requests)
    calls = itertools.count()
    verify = DraftSteps._compute

    def failing(self: DraftSteps, info: Any) -> Any:
        results = verify(self, info)
        if next(calls) % 3 == 0:
            raise RuntimeError("planted")
        return results

    monkeypatch.setattr(DraftSteps, "_compute", failing)
    actual, engine = run(args, requests, known_future(expected), num_speculative_tokens=3)
    assert actual == expected and engine.stats().spec_drafts

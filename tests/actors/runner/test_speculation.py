"""Speculation changes no token and no log probability, whatever rules a request has."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfin.actors.config import EngineConfig, resolve
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import (
    EngineRequest,
    Int32Array,
    Int64Array,
    Logprobs,
    NewRequest,
    Sampling,
    StopRules,
)
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.plugins import RunnerPlugins
from rayfin.actors.runner.proposers.interface import Drafts, TokenTable
from rayfin.actors.scheduler.engine import Engine

Make = Callable[..., Any]
OUTPUT = 18
PROMPTS = [[15, 9, 30, 15, 9, 30, 15, 9], [17, 17, 60, 20, 44, 31, 8, 17, 90], [11, 12], [5] * 9]
ROWS = "start: ROW+\nROW: /[a-d]{1,3}=[0-9]{1,4};/"

RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9},
    "filtered": {"temperature": 1.1, "top_k": 40, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.7, "temperature": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.4},
    "logit_bias": {"logit_bias": ((7, 3.0), (9, -4.0))},
    "bad_words": {"bad_words": ((15, 9), (31,))},
    "min_tokens": {"banned": (2, 7, 31), "banned_until": 16},
    "allowed": {"allowed": (5, 7, 9, 11, 60)},
    "logprobs": {"logprobs": 3, "temperature": 0.6},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "grammar": {"guidance": Guidance(grammar=ROWS, ends=(2,))},
}


class Future:
    """Knows what each prompt goes on with, and says it right with a chance of ``right``."""

    streams: list[list[int]] = []
    right = 1.0

    def __init__(self) -> None:
        self.texts = TokenTable(8, 256)
        self.random = np.random.default_rng(0)

    def add(self, slot: int, request: NewRequest) -> None:
        assert request.history is not None
        self.texts.add(slot, request.history)

    def remove(self, slot: int) -> None:
        self.texts.remove(slot)

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            for token in tokens[row, :count]:
                self.texts.append(np.array([slot]), np.array([token], np.int32))

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        tokens = np.zeros((len(slots), int(room.max())), np.int32)
        for row, slot in enumerate(slots.tolist()):
            known = self.texts.tokens[slot, : self.texts.lengths[slot]].tolist()
            stream = next((own for own in self.streams if own[: len(known)] == known), known)
            rest = stream[len(known) :][: tokens.shape[1]]
            tokens[row, : len(rest)] = rest
            wrong = self.random.random(tokens.shape[1]) >= self.right
            tokens[row, wrong] = (tokens[row, wrong] + 1) % 100
        return Drafts(tokens, room)


Outcome = tuple[dict[int, list[int]], dict[int, list[Any]], dict[int, str]]


def run(
    args: Any, requests: list[EngineRequest], proposer: Any = None, **changes: Any
) -> tuple[Outcome, Engine]:
    """(tokens, log probabilities, how it ended) of each request; and the engine."""
    runner = ModelRunner(args, plugins=RunnerPlugins(proposer=proposer))
    config: EngineConfig = replace(resolve(args, *runner.profile()), **changes)
    engine = Engine(config, InlineExecutor(runner, config))
    tokens: dict[int, list[int]] = {request.key: [] for request in requests}
    scores: dict[int, list[Any]] = {request.key: [] for request in requests}
    ends: dict[int, str] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for deltas in engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
            if deltas.logprobs is not None:
                for at, entry in _entries(deltas.logprobs):
                    scores[int(deltas.keys[at])].append(entry)
            for key, prompt in deltas.prompt_logprobs.items():
                scores[key] += list(_entries(prompt))
            for ended in deltas.ended:
                ends[ended.key] = f"{ended.finish_reason} {ended.stop_reason} {ended.error}"
    engine.check_integrity()
    return (tokens, scores, ends), engine


def _entries(logprobs: Logprobs) -> Any:
    columns = (logprobs.chosen, logprobs.rank, logprobs.ids, logprobs.values)
    for at, *entry in zip(logprobs.at.tolist(), *(c.tolist() for c in columns), strict=True):
        yield at, entry


def requests_of(
    sampling: Sampling, max_tokens: int = OUTPUT, stop: tuple[int, ...] = ()
) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(key),
            prompt=np.array(prompt, np.int32),
            sampling=replace(sampling, seed=key),
            stopping=StopRules(max_tokens, frozenset(stop)),
            key=key,
        )
        for key, prompt in enumerate(PROMPTS)
    ]


def speculating(args: Any, **settings: Any) -> Any:
    written = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, **settings}
    return replace(args, speculative_config=json.dumps(written))


def known_future(outcome: Outcome, right: float = 1.0) -> type[Future]:
    streams = [[*PROMPTS[key], *tokens] for key, tokens in outcome[0].items()]
    return type("Known", (Future,), {"streams": streams, "right": right})


@pytest.mark.parametrize("rule", RULES)
def test_equal_over_every_rule(
    rule: str, tiny_model: Make, engine_args: Make, tiny_tokenizer: Make
) -> None:
    tokenizer = str(tiny_tokenizer("byte_level"))
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24, tokenizer=tokenizer)
    requests = requests_of(Sampling(**RULES[rule]))
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
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2"])
@pytest.mark.parametrize(("most", "lease"), [(1, 1), (8, 1), (2, 8), (5, 3)])
def test_equal_on_other_models(
    name: str, most: int, lease: int, tiny_model: Make, engine_args: Make
) -> None:
    args = engine_args(tiny_model(name).folder, max_decoding_batch=24)
    for rule in ("greedy", "seeded", "logprobs", "repetition_penalty"):
        requests = requests_of(Sampling(**RULES[rule]), 40)
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
    requests = requests_of(sampling)
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
    verify = ModelRunner._compute_drafts

    def failing(self: ModelRunner, info: Any) -> Any:
        results = verify(self, info)
        if next(calls) % 3 == 0:
            raise RuntimeError("planted")
        return results

    monkeypatch.setattr(ModelRunner, "_compute_drafts", failing)
    actual, engine = run(args, requests, known_future(expected), num_speculative_tokens=3)
    assert actual == expected and engine.stats().spec_drafts

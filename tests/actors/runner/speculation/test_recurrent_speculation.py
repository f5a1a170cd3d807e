"""Speculation changes no token of decoders whose layers keep a state: it goes back with drafts."""

import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.config import resolve
from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import BeamParams, Sampling
from rayfin.actors.runner.execution.draft_steps import DraftSteps
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.scheduler.engine import Engine
from spec_checks import OUTPUT, PROMPTS, Outcome, known_future, requests_of, run, speculating
from tiers import few

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tools"))

from model_table import MAX_TOKENS, build, generate

Make = Callable[..., Any]
FAMILIES = ("qwen3_next", "qwen3_5_text", "lfm2", "mamba", "mamba2", "zamba")
OTHERS = ("bamba", "falcon_mamba", "jamba", "lfm2_moe")
"""More families of transformers whose layers keep states."""

DRAFTING: dict[str, Any] = {"num_speculative_tokens": 3, "num_draft_states": 24}
"""Changes of a configuration for a proposer from outside."""


@pytest.fixture
def args_of(tiny_model: Make, engine_args: Make) -> Make:
    """family, changes -> settings of an engine with room for drafts."""

    def make(family: str = "qwen3_next", **changes: Any) -> Any:
        changes = {"max_decoding_batch": 24, "max_model_len": 64, **changes}
        return engine_args(tiny_model(family).folder, **changes)

    return make


def _expected(tiny: Any, count: int = OUTPUT) -> dict[int, list[int]]:
    """Tokens of transformers' own generate, of which an end-of-sequence token is one too."""
    return {key: tiny.greedy(prompt, count) for key, prompt in enumerate(PROMPTS)}


def _starts_as(actual: Outcome, expected: dict[int, list[int]]) -> None:
    for key, tokens in expected.items():
        assert actual[0][key][: len(tokens)] == tokens, f"prompt {key}"


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "auto") for family in FAMILIES), *few([(own, "torch") for own in FAMILIES], 2)],
)
def test_tokens_are_those_of_generate(
    family: str, attention: str, tiny_model: Make, args_of: Make
) -> None:
    """Drafts that are right, wrong, or either; compiled layers, and transformers' modules."""
    args, requests = args_of(family, attention=attention), requests_of(Sampling())
    plain, _ = run(args, requests)
    _starts_as(plain, _expected(tiny_model(family)))
    for right in (1.0, 0.0, 0.6):
        actual, engine = run(args, requests, known_future(plain, right), **DRAFTING)
        assert actual == plain
        stats = engine.stats()
        assert stats.spec_drafts and (stats.spec_accepted_tokens > 0) == (right > 0)
        assert right < 1 or stats.spec_accepted_tokens == stats.spec_draft_tokens


@pytest.mark.parametrize("rule", [{"temperature": 0.9}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("adaptive", [False, True])
def test_own_proposers(rule: dict[str, Any], adaptive: bool, args_of: Make) -> None:
    for family in ("qwen3_next", "lfm2"):
        args, requests = args_of(family), requests_of(Sampling(**rule), 40)
        expected, _ = run(args, requests)
        for method in ("ngram", "suffix"):
            drafting = speculating(args, method=method, adaptive=adaptive, prompt_lookup_min=1)
            actual, engine = run(drafting, requests)
            assert actual == expected
            assert adaptive or engine.stats().spec_drafts


@pytest.mark.slow(reason="builds and loads a model of each other family")
@pytest.mark.parametrize("family", few(OTHERS, 1))
def test_any_family(family: str, engine_args: Make, tmp_path: Path) -> None:
    """Of each one that keeps states, as tools/model_table.py builds it."""
    model = build(family)
    model.save_pretrained(tmp_path)
    args = engine_args(tmp_path, max_decoding_batch=24, max_model_len=64)
    requests = requests_of(Sampling())
    plain, _ = run(args, requests)
    for key, prompt in enumerate(PROMPTS):
        assert plain[0][key][:MAX_TOKENS] == generate(model, prompt), f"prompt {key}"
    actual, engine = run(args, requests, known_future(plain, 0.7), **DRAFTING)
    assert actual == plain and engine.stats().spec_accepted_tokens
    for method in ("ngram", "suffix"):
        drafting = speculating(args, method=method, prompt_lookup_min=1)
        actual, engine = run(drafting, requests)
        assert actual == plain and engine.stats().spec_drafts


@pytest.mark.parametrize(("most", "lease", "steps"), [(1, 1, 2), (8, 4, 1), (2, 8, 2), (5, 3, 2)])
def test_leases_and_steps_in_flight(most: int, lease: int, steps: int, args_of: Make) -> None:
    args, requests = args_of(), requests_of(Sampling(temperature=0.8), 40)
    expected, _ = run(args, requests)
    more = {"num_speculative_tokens": most, "max_lease": lease, "steps_in_flight": steps}
    actual, _ = run(args, requests, known_future(expected, 0.8), **(DRAFTING | more))
    assert actual == expected


def test_few_states_for_drafts(args_of: Make) -> None:
    """Drafts of a step are as many as there are states for."""
    args, requests = args_of(), requests_of(Sampling(), 30)
    expected, _ = run(args, requests)
    for states in (1, 5):
        changes = DRAFTING | {"num_draft_states": states}
        actual, engine = run(args, requests, known_future(expected, 0.7), **changes)
        assert actual == expected
        assert engine.stats().spec_drafts


def test_beside_chunks_of_prompts(args_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts have chunks of prompts too, which go on from states in other steps."""
    args = args_of(max_batch_tokens=25, long_prefill_token_threshold=3)
    requests = requests_of(Sampling(temperature=0.7), 30)
    expected, _ = run(args, requests)
    verify, mixed = DraftSteps._compute, []

    def watched(self: DraftSteps, info: Any) -> Any:
        mixed.append(info.prefill_batch)
        return verify(self, info)

    monkeypatch.setattr(DraftSteps, "_compute", watched)
    actual, _ = run(args, requests, known_future(expected, 0.8), **DRAFTING)
    assert actual == expected and any(mixed)


def test_choices_and_preemption(args_of: Make) -> None:
    """n > 1 starts from one prompt; short of pages requests are preempted."""
    args, sampling = args_of(), Sampling(temperature=1.0, repetition_penalty=1.1)
    requests = requests_of(sampling)
    for number in range(3):
        fork = replace(requests[1], key=10 + number, request_id=f"c{number}", parent_key=1)
        requests.append(replace(fork, sampling=replace(sampling, seed=10 + number)))
    expected, _ = run(args, requests)
    future = known_future(_of_prompts(expected), 0.8)
    for pages in (64, 18):
        actual, engine = run(args, requests, future, num_pages=pages, **DRAFTING)
        assert actual == expected and engine.stats().spec_drafts
        assert (engine.stats().preemptions > 0) == (pages == 18)


def _of_prompts(outcome: Outcome) -> Outcome:
    """What the requests of ``PROMPTS`` have said."""
    return {key: outcome[0][key] for key in range(len(PROMPTS))}, {}, {}


@pytest.mark.parametrize(
    ("family", "preemption", "steps"),
    [("lfm2", "recompute", 1), ("lfm2", "swap", 1), ("qwen3_next", "recompute", 2)],
)
def test_preempted_at_each_step(family: str, preemption: str, steps: int, args_of: Make) -> None:
    args, requests = args_of(family, preemption=preemption), requests_of(Sampling())
    drafting = DRAFTING | {"steps_in_flight": steps}
    expected, _ = run(args, requests)
    turns = itertools.count()

    def preempts(engine: Engine) -> None:
        lifecycle = engine.lifecycle
        if next(turns) % 4 == 3 and len(lifecycle.state.running):
            lifecycle.preempt(lifecycle.victim())

    future = known_future(expected, 0.8)
    actual, engine = run(args, requests, future, disturb=preempts, **drafting)
    assert actual == expected
    assert engine.stats().preemptions and engine.stats().spec_accepted_tokens


def test_runner_that_died(args_of: Make) -> None:
    """Requests go on from their tokens, with new states."""
    args, requests = args_of(), requests_of(Sampling(temperature=0.6), 30)
    expected, _ = run(args, requests)
    turns = itertools.count()

    def dies(engine: Engine) -> None:
        if next(turns) in (4, 9):
            engine.replace_runners(RunnerGroupFailed("planted"))

    future = known_future(expected, 0.8)
    actual, engine = run(args, requests, future, disturb=dies, **DRAFTING)
    assert actual == expected
    assert engine.stats().runner_restarts == 2 and engine.stats().spec_accepted_tokens


def test_goes_on_from_another_engine(args_of: Make) -> None:
    args = args_of()
    requests = requests_of(Sampling(temperature=0.8, frequency_penalty=0.5))
    expected, _ = run(args, requests)
    for cut in (1, 7):
        rest = [replace(own, output=expected[0][own.key][:cut]) for own in requests]
        actual, _ = run(speculating(args), rest)
        assert {k: expected[0][k][:cut] + v for k, v in actual[0].items()} == expected[0]


@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_second_turn_starts_from_a_snapshot(
    family: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Snapshots are of tokens that count; the turn that starts from one is drafted too."""
    tiny = tiny_model(family)
    settings = '{"method": "ngram", "adaptive": false, "prompt_lookup_min": 1}'
    engine = served(
        tiny.folder, max_decoding_batch=24, max_model_len=128, speculative_config=settings
    )
    prompt = [3 + (7 * place) % 19 for place in range(85)]
    first = engine.run(request_of(0, prompt, 12))[0]
    turn = [*prompt, *first, 9, 30, 17]
    for key in (1, 2):  # the second one shares what the first one has computed
        said = engine.run(request_of(key, turn, 12, eos=[2]))[key]
        assert said == tiny.greedy(turn, 12)
    assert engine.cached[1] == 84 and engine.cached[2] >= 84
    assert engine.engine.stats().spec_drafts


def test_sleep_frees_the_states(args_of: Make) -> None:
    runner = ModelRunner(speculating(args_of()))
    runner.start(resolve(runner._args, *runner.profile()), epoch=0)
    states = weakref.ref(runner._loaded.states)
    assert (
        runner._execution is not None
        and runner._execution.speculator is not None
        and states() is not None
    )
    runner.sleep()
    gc.collect()
    assert states() is None


def test_beams_get_no_drafts(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompt = tiny_model("qwen3_next"), [15, 9, 30] * 6
    settings = '{"method": "ngram", "adaptive": false}'
    engine = served(
        tiny.folder, max_decoding_batch=24, max_model_len=64, speculative_config=settings
    )
    beams = replace(request_of(0, prompt, 10, eos=[2]), beams=BeamParams(3))
    tokens = engine.run(beams, request_of(1, prompt, 10, eos=[2]))
    assert tokens[1] == tiny.greedy(prompt, 10)
    expected = tiny.model.generate(
        torch.tensor([prompt]), num_beams=3, max_new_tokens=10, do_sample=False
    )
    assert engine.hypotheses[0][0].tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("where", ["forward", "verify"])
def test_a_step_that_fails_runs_without_drafts(
    where: str, args_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states are those before it, whether its layers had all run or not."""
    args, requests = args_of(), requests_of(Sampling(), 40)
    expected, _ = run(args, requests)
    calls, drafted = itertools.count(), [False]
    verify, layers = DraftSteps._compute, PagedModel._run

    def fails(planted: str) -> None:
        if planted == where and drafted[0] and next(calls) % 3 == 0:
            raise RuntimeError("planted")

    def verifies(self: DraftSteps, info: Any) -> Any:
        drafted[0] = True
        try:
            results = verify(self, info)
            fails("verify")
        finally:
            drafted[0] = False
        return results

    def runs(self: PagedModel, *inputs: Any, **options: Any) -> Any:
        output = layers(self, *inputs, **options)
        fails("forward")
        return output

    monkeypatch.setattr(DraftSteps, "_compute", verifies)
    monkeypatch.setattr(PagedModel, "_run", runs)
    actual, engine = run(args, requests, known_future(expected, 0.8), **DRAFTING)
    assert actual == expected and engine.stats().spec_accepted_tokens and next(calls) > 3


def test_states_of_drafts_are_off_the_page_budget(args_of: Make) -> None:
    plain, drafting = args_of(kv_cache_memory=None), speculating(args_of(kv_cache_memory=None))
    runner = ModelRunner(drafting)
    facts, limits = runner.profile()
    config = resolve(drafting, facts, limits)
    assert config.num_draft_states == 23 and resolve(plain, facts, limits).num_draft_states == 0
    loaded = runner._loaded
    of_drafts = loaded.bytes_of_requests(drafting, limits) - loaded.bytes_of_requests(plain, limits)
    assert of_drafts == 23 * facts.state_bytes
    runner.start(config, 0)
    assert loaded.states is not None and loaded.states.draft_room == 23
    assert loaded.states.padding == 2 * 24 + config.num_snapshots + 23
    assert np.all(loaded.states._lengths < 0), "steps that were timed have left states"

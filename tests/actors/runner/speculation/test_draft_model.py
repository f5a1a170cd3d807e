"""A draft model changes no token, and its layers follow their requests wherever pages go."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loaded_once import make_runner
from rayfin.actors.config import resolve
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.speculation.draft_model import DraftedModel
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.weights.sources import propose
from rayfin.actors.weights.store import WeightStore
from rayfin.deployments.client.weights import UpdateOptions, write_version
from tiers import few

Make = Callable[..., Any]
PROMPTS = [[15, 9, 30, 15, 9, 30, 15, 9], [17, 17, 60, 20, 44, 31, 8, 17, 90], [11, 12], [5] * 40]
OUTPUT = 20
PENALTY = {"temperature": 0.5, "repetition_penalty": 1.3}
MODELS: Any = AutoModelForCausalLM


def drafted(args: Any, model: Any, **settings: Any) -> Any:
    written = {"model": str(model), "num_speculative_tokens": 4, "adaptive": False, **settings}
    return replace(args, speculative_config=json.dumps(written))


def requests_of(sampling: Sampling, first: int = 0) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(key),
            prompt=np.array(prompt, np.int32),
            sampling=replace(sampling, seed=key),
            stopping=StopRules(OUTPUT, frozenset()),
            key=first + key,
        )
        for key, prompt in enumerate(PROMPTS)
    ]


def engine_of(args: Any, **changes: Any) -> Engine:
    runner = make_runner(args)
    config = replace(resolve(args, *runner.profile()), **changes)
    return Engine(config, InlineExecutor(runner, config))


def finish(engine: Engine, requests: list[EngineRequest]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {request.key: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for deltas in engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
            assert all(ended.error is None for ended in deltas.ended)
    engine.check_integrity()
    return tokens


def share_right(engine: Engine) -> float:
    stats = engine.stats()
    assert stats.spec_draft_tokens
    return stats.spec_accepted_tokens / stats.spec_draft_tokens


@pytest.fixture(scope="module")
def other_folder(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that another seed made: its drafts are seldom right."""
    folder = tmp_path_factory.mktemp("other")
    tiny_models.make_tiny_model("llama", folder, seed=1)
    return Path(folder)


def test_new_weights_of_the_draft_model(
    tiny_model: Make, engine_args: Make, other_folder: Path, tmp_path: Path
) -> None:
    """The model's own weights as those of its draft model: then all drafts are right."""
    tiny = tiny_model("llama")
    args = drafted(engine_args(tiny.folder), other_folder)
    store, draft = WeightStore(tmp_path / "a" / "b"), UpdateOptions(target="draft")
    runner = ModelRunner(args)

    def right() -> float:
        config = resolve(args, *runner.profile())
        engine = Engine(config, InlineExecutor(runner, config))
        finish(engine, requests_of(Sampling()))
        return share_right(engine)

    assert right() < 0.5
    name = "model.layers.0.mlp.up_proj.weight"
    sent = load_file(tiny.folder / "model.safetensors")
    part = propose(store, write_version(store, {name: sent[name]}, "", args, draft))
    vote = runner.vote(part)
    assert not vote.in_place and f"draft.{name}" not in vote.kept and len(vote.kept) > 5
    version = propose(store, write_version(store, sent, "", args, draft))
    assert runner.vote(version).kept == []
    runner.reload(version)
    assert right() == 1.0


@pytest.mark.parametrize(
    "rule",
    few(
        [
            {},
            {"temperature": 0.9},
            {"logprobs": 2},
            {"temperature": 0.5, "repetition_penalty": 1.3},
        ],
        2,
    ),
)
def test_equal_with_a_draft_model_that_is_right_or_wrong(
    rule: dict[str, Any], tiny_model: Make, engine_args: Make, other_folder: Path
) -> None:
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24)
    requests = requests_of(Sampling(**rule))
    expected = finish(engine_of(args), requests)
    for model in (args.model, tiny_model("qwen3").folder, other_folder):
        engine = engine_of(drafted(args, model))
        assert finish(engine, requests) == expected
        if model == args.model and not rule:
            assert share_right(engine) == 1
        assert finish(engine_of(drafted(args, model, adaptive=True)), requests) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 15},  # preempts, and computes again
        {"num_pages": 15, "num_host_pages": 40},  # or swaps
        {"max_lease": 8},
        {"steps_in_flight": 1, "max_lease": 3},
        {"num_speculative_tokens": 1},
    ],
)
def test_its_layers_go_with_the_pages(
    changes: dict[str, int], tiny_model: Make, engine_args: Make
) -> None:
    """The model drafts for itself, so every draft is right, unless the cache has the wrong tokens.

    Requests fork, their prompts are found in the cache, and pages are compared.
    """
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24, check_pages=True)
    requests = requests_of(Sampling())
    requests += [replace(requests[1], key=10 + n, parent_key=1) for n in range(2)]
    expected = finish(engine_of(args), requests)
    engine = engine_of(drafted(args, args.model), **changes)
    assert finish(engine, requests) == expected
    again = requests_of(Sampling(), first=50)
    assert finish(engine, again) == {50 + key: expected[key] for key in range(len(PROMPTS))}
    assert engine.stats().prefix_hits
    assert share_right(engine) > 0.97
    if "num_pages" in changes:
        stats = engine.stats()
        assert stats.preemptions and bool(stats.swapped_in) == ("num_host_pages" in changes)


RECURRENT = ("qwen3_next", "qwen3_5_text", "lfm2", "mamba", "mamba2", "zamba")


@pytest.fixture(scope="module")
def alike(
    tiny_model: Make, tiny_models: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """family -> a llama that says by the last token alone what the family's model may say.

    It has that model's embeddings and head, and its layers add nothing: some drafts are right.
    """

    @functools.cache
    def make(family: str) -> Path:
        folder = Path(tmp_path_factory.mktemp(f"alike_{family}"))
        draft, target = tiny_models.make_tiny_model("llama", folder), tiny_model(family).model
        with torch.no_grad():
            for name, weight in draft.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    weight.zero_()
            for own, given in (
                (draft.get_input_embeddings(), target.get_input_embeddings()),
                (draft.get_output_embeddings(), target.get_output_embeddings()),
            ):
                own.weight.copy_(given.weight)
        draft.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("family", few(RECURRENT, 3))
def test_before_a_model_that_keeps_states(
    family: str, tiny_model: Make, engine_args: Make, alike: Callable[[str], Path]
) -> None:
    """States go back to the last right draft; some are right, and some are not."""
    tiny = tiny_model(family)
    args = engine_args(tiny.folder, max_decoding_batch=24, max_model_len=64)
    for rule in ({}, {"temperature": 0.8, "repetition_penalty": 1.2}):
        requests = requests_of(Sampling(**rule))
        expected = finish(engine_of(args), requests)
        if not rule:
            for key, prompt in enumerate(PROMPTS):
                said = tiny.greedy(prompt, OUTPUT)  # to an end-of-sequence token
                assert expected[key][: len(said)] == said
        for adaptive in (False, True):
            engine = engine_of(drafted(args, alike(family), adaptive=adaptive))
            assert finish(engine, requests) == expected
            assert adaptive or rule or 0 < share_right(engine) < 1


def test_what_it_missed_it_computes_when_it_drafts_again(
    tiny_model: Make, engine_args: Make
) -> None:
    """A time without drafts: then many tokens at once, no more of a step than may be."""
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24)
    requests = requests_of(Sampling())
    expected = finish(engine_of(args), requests)
    runner = ModelRunner(drafted(args, args.model))
    config = resolve(drafted(args, args.model), *runner.profile())
    engine = Engine(config, InlineExecutor(runner, config))
    assert runner._execution is not None
    speculator = runner._execution.speculator
    assert speculator is not None
    room, calls = speculator.planner.room, iter(range(1000))
    silent = lambda left, *rest: room(left, *rest) * (next(calls) > 6)  # noqa: E731
    speculator.planner.room = silent  # type: ignore[method-assign]
    assert finish(engine, requests) == expected
    assert share_right(engine) == 1


def test_pages_have_room_for_both(tiny_model: Make, engine_args: Make) -> None:
    plain = ModelRunner(engine_args(tiny_model("llama").folder))
    args = drafted(engine_args(tiny_model("llama").folder), tiny_model("qwen3").folder)
    both = ModelRunner(args)
    model = both._loaded.model
    assert isinstance(model, DraftedModel)
    draft = ModelRunner(engine_args(tiny_model("qwen3").folder))
    assert both._loaded.page_bytes(4) == sum(r._loaded.page_bytes(4) for r in (plain, draft))


def test_no_drafts_beyond_its_positions(
    tiny_model: Make, tiny_models: Any, engine_args: Make, tmp_path: Path
) -> None:
    config = tiny_models.tiny_config("gpt2")
    config.n_positions = 56
    MODELS.from_config(config).save_pretrained(tmp_path)
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24)
    requests = requests_of(Sampling())
    expected = finish(engine_of(args), requests)
    engine = engine_of(drafted(args, tmp_path))
    assert finish(engine, requests) == expected
    assert engine.stats().spec_drafts


def test_refused(tiny_model: Make, tiny_models: Any, engine_args: Make, tmp_path: Path) -> None:
    config = tiny_models.tiny_config("llama")
    config.vocab_size = 90
    MODELS.from_config(config).save_pretrained(tmp_path)
    args = engine_args(tiny_model("llama").folder)
    with pytest.raises(InvalidConfig, match="90 tokens in its vocabulary.* has 128") as caught:
        ModelRunner(drafted(args, tmp_path))
    assert caught.value.param == "speculative_config"
    with pytest.raises(InvalidConfig, match="no folder /nowhere"):
        ModelRunner(drafted(args, "/nowhere"))
    with pytest.raises(InvalidConfig, match="cannot draft .* keep states; a draft model has"):
        ModelRunner(drafted(args, tiny_model("mamba2").folder))

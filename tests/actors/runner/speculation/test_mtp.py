"""A checkpoint's own head drafts what plain torch says, and changes no token."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from draft_heads import PlainMtp
from head_checks import (
    PROMPTS,
    RULES,
    engine_of,
    finish,
    headed,
    requests_of,
    ruled,
    share_right,
    watch,
)
from rayfin.actors.errors import InvalidConfig, InvalidRequest, RunnerGroupFailed
from rayfin.actors.messages import Sampling, StopRules
from rayfin.actors.model_files.digests import tensors_digest
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.speculation.heads import HeadedModel
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.weights.version import WeightVersion
from spec_checks import run
from tiers import few

Make = Callable[..., Any]
FORMS = {
    "llama": False,
    "qwen3": False,
    "glm4_moe": True,
    "deepseek_v3": True,
    "qwen3_next": False,
    "qwen3_5_text": False,
}
"""Models, and whether the head is behind the last layer."""

RECURRENT = ("qwen3_next", "qwen3_5_text")
"""Those whose layers keep states, which go back to the last right draft."""

Headed = tuple[Path, PlainMtp]


@pytest.fixture(scope="module")
def with_head(
    tiny_model: Make, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Headed]:
    """A model's checkpoint with a head that has learned what it says after the prompts."""
    made: dict[str, Headed] = {}

    def make(name: str) -> Headed:
        if name not in made:
            tiny = tiny_model(name)
            head = PlainMtp(tiny.model, behind=FORMS[name])
            head.fit([[*prompt, *tiny.greedy(prompt, 20)] for prompt in PROMPTS])
            folder = tmp_path_factory.mktemp(f"{name}-mtp")
            shutil.copytree(tiny.folder, folder, dirs_exist_ok=True)
            head.save(folder)
            made[name] = folder, head
        return made[name]

    return make


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *few([(name, "auto") for name in FORMS], 3),
        *few([(name, "reference") for name in ("llama", "glm4_moe", "qwen3_next")], 1),
    ],
)
def test_drafts_are_those_of_plain_torch(
    name: str, attention: str, with_head: Callable[[str], Headed], engine_args: Make
) -> None:
    folder, plain = with_head(name)
    args = engine_args(folder, max_decoding_batch=24, max_batch_tokens=24, attention=attention)
    expected = finish(engine_of(args)[0], requests_of(Sampling()))
    engine, runner = engine_of(headed(args, "mtp"))
    seen = watch(runner)
    assert finish(engine, requests_of(Sampling())) == expected
    assert sum(len(drafts) for _, drafts in seen) > 40
    for text, drafts in seen:
        assert drafts == plain.drafts(text, len(drafts))
    assert share_right(engine) > 0.2


@pytest.mark.parametrize(
    ("rule", "name"),
    [*((rule, "llama") for rule in RULES), *few([(rule, "qwen3_5_text") for rule in RULES], 2)],
)
def test_no_token_changes(
    rule: str,
    name: str,
    with_head: Callable[[str], Headed],
    engine_args: Make,
    tiny_tokenizer: Make,
) -> None:
    tokenizer = str(tiny_tokenizer("byte_level"))
    args = engine_args(with_head(name)[0], max_decoding_batch=24, tokenizer=tokenizer)
    requests = ruled(rule)
    expected = finish(engine_of(args)[0], requests)
    for settings in ({}, {"adaptive": True}):
        assert finish(engine_of(headed(args, "mtp", **settings))[0], requests) == expected


@pytest.mark.parametrize("changes", [{"num_pages": 15}, {"num_pages": 15, "num_host_pages": 40}])
def test_its_layer_goes_with_the_pages(
    changes: dict[str, int], with_head: Callable[[str], Headed], engine_args: Make
) -> None:
    args = engine_args(with_head("llama")[0], max_decoding_batch=24, check_pages=True)
    requests = requests_of(Sampling())
    expected, _ = finish(engine_of(args)[0], requests)
    engine, _ = engine_of(headed(args, "mtp"), **changes)
    assert finish(engine, requests)[0] == expected
    assert engine.stats().preemptions and share_right(engine) > 0.2


def test_the_fused_decoder_stays(with_head: Callable[[str], Headed], engine_args: Make) -> None:
    model = ModelRunner(headed(engine_args(with_head("llama")[0]), "mtp"))._loaded.model
    assert isinstance(model, HeadedModel) and isinstance(model.target, CpuDecoder)


def test_new_weights_bring_a_head_or_leave_it(
    tiny_model: Make, engine_args: Make, tmp_path: Path
) -> None:
    """A version with a head is drafted by it; one without leaves that of the model."""
    tiny = tiny_model("llama")
    versions = []
    for seed, name in enumerate(("base", "sent")):
        shutil.copytree(tiny.folder, tmp_path / name)
        PlainMtp(tiny.model, behind=False, seed=seed).save(tmp_path / name)
        head = tmp_path / name / "z.safetensors"
        tensors = load_file(tiny.folder / "model.safetensors")
        save_file(
            tensors | load_file(head), tmp_path / name / "model.safetensors", {"format": "pt"}
        )
        head.unlink()
        versions.append(version_of(tmp_path / name))
    runner = ModelRunner(headed(engine_args(tmp_path / "base"), "mtp"))

    def drafts() -> torch.Tensor:
        model = runner.loaded.model
        assert isinstance(model, HeadedModel)
        found: torch.Tensor = model.module.fc(torch.eye(2 * tiny.model.config.hidden_size))
        return found.clone()

    before, vote = drafts(), runner.vote(versions[1])
    assert not vote.in_place and not vote.kept
    runner.reload(versions[1])
    assert not torch.equal(drafts(), before)
    vote = runner.vote(version_of(tiny.folder))
    assert {name.partition(".")[0] for name in vote.kept} == {"mtp"}
    runner.reload(version_of(tiny.folder))
    assert torch.equal(drafts(), before)
    parts = load_file(tmp_path / "sent" / "model.safetensors")
    del parts["mtp.fc.weight"]
    save_file(parts, tmp_path / "sent" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequest, match="give all of them, or none") as caught:
        runner.vote(version_of(tmp_path / "sent"))
    assert caught.value.param == "mtp.fc.weight"


def version_of(folder: Path) -> WeightVersion:
    place = folder / "model.safetensors"
    return WeightVersion(1, "1", tensors_digest([place]), str(place))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_wrong_head_beside_recurrent_layers(
    name: str, tiny_model: Make, engine_args: Make, tmp_path: Path
) -> None:
    """It has learned nothing: nearly each step takes states back."""
    tiny = tiny_model(name)
    shutil.copytree(tiny.folder, tmp_path, dirs_exist_ok=True)
    PlainMtp(tiny.model, behind=False).save(tmp_path)
    engine, _ = engine_of(headed(engine_args(tmp_path, max_decoding_batch=24), "mtp"))
    tokens, _ = finish(engine, requests_of(Sampling()))
    for key, prompt in enumerate(PROMPTS):
        expected = tiny.greedy(prompt, 20)
        assert tokens[key][: len(expected)] == expected
    assert share_right(engine) < 0.2


def test_beside_a_tower(tiny_model: Make, engine_args: Make, tmp_path: Path) -> None:
    """Qwen3.5 is published as a model that reads images; its text is drafted."""
    tiny = tiny_model("qwen3_5_text")
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    tower["out_hidden_size"] = tiny.model.config.hidden_size
    config = Qwen3_5Config(text_config=tiny.model.config.to_dict(), vision_config=tower)
    both = Qwen3_5ForConditionalGeneration(config)
    both.model.language_model.load_state_dict(tiny.model.model.state_dict())
    both.lm_head.load_state_dict(tiny.model.lm_head.state_dict())
    both.save_pretrained(tmp_path)
    head = PlainMtp(tiny.model, behind=False)
    head.fit([[*prompt, *tiny.greedy(prompt, 20)] for prompt in PROMPTS])
    head.save(tmp_path)
    args = engine_args(tmp_path, max_decoding_batch=24, language_model_only=True)
    engine, runner = engine_of(headed(args, "mtp"))
    seen = watch(runner)
    tokens, _ = finish(engine, requests_of(Sampling()))
    for key, prompt in enumerate(PROMPTS):
        expected = tiny.greedy(prompt, 20)
        assert tokens[key][: len(expected)] == expected
    assert seen and all(drafts == head.drafts(text, len(drafts)) for text, drafts in seen)
    assert share_right(engine) > 0.2


@pytest.mark.parametrize("event", ["forks", "preemption", "restart"])
def test_recurrent_layers_go_on_after(
    event: str, with_head: Callable[[str], Headed], engine_args: Make
) -> None:
    args = engine_args(with_head("qwen3_next")[0], max_decoding_batch=24, check_pages=True)
    requests = requests_of(Sampling())
    if event == "forks":
        for number in range(3):
            fork = replace(requests[1], key=10 + number, request_id=f"c{number}", parent_key=1)
            requests.append(replace(fork, sampling=Sampling(temperature=0.6, seed=10 + number)))
    expected, _ = run(args, requests)
    turns = itertools.count()

    def disturb(engine: Engine) -> None:
        turn, lifecycle = next(turns), engine.lifecycle
        if event == "preemption" and turn % 4 == 3 and len(lifecycle.state.running):
            lifecycle.preempt(lifecycle.victim())
        elif event == "restart" and turn in (4, 9):
            engine.replace_runners(RunnerGroupFailed("planted"))

    actual, engine = run(headed(args, "mtp"), requests, disturb=disturb)
    assert actual == expected
    stats = engine.stats()
    assert stats.spec_accepted_tokens
    assert event != "preemption" or stats.preemptions > 3
    assert stats.runner_restarts == (2 if event == "restart" else 0)


def test_recurrent_layers_start_from_a_snapshot(
    with_head: Callable[[str], Headed], tiny_model: Make, engine_args: Make
) -> None:
    """The second turn finds the first one's pages and states, which the head has too."""
    tiny = tiny_model("qwen3_next")
    args = engine_args(with_head("qwen3_next")[0], max_decoding_batch=24)
    engine, _ = engine_of(headed(args, "mtp"))
    turn = [3 + (7 * place) % 19 for place in range(85)]
    for key in range(2):
        asked = replace(
            requests_of(Sampling())[0],
            key=key,
            prompt=np.array(turn, np.int32),
            stopping=StopRules(12, frozenset([2])),
        )
        said = finish(engine, [asked])[0][key]
        assert said == tiny.greedy(turn, 12)
        turn += [*said, 9, 30, 17]
    assert engine.stats().prefix_hits and engine.stats().spec_drafts


def test_refused(tiny_model: Make, engine_args: Make) -> None:
    args = engine_args(tiny_model("llama").folder)
    with pytest.raises(InvalidConfig, match="has no layer for multi-token prediction") as caught:
        ModelRunner(headed(args, "mtp"))
    assert caught.value.param == "speculative_config"

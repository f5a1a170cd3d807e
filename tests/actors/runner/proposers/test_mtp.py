"""A checkpoint's own head drafts what plain torch says, and changes no token."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_heads import PlainMtp
from head_checks import (
    PROMPTS,
    RULES,
    engine_of,
    finish,
    headed,
    requests_of,
    share_right,
    watch,
)
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.messages import Sampling
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.proposers.heads import HeadedModel

Make = Callable[..., Any]
FORMS = {"llama": False, "qwen3": False, "glm4_moe": True, "deepseek_v3": True}
"""Models, and whether the head is behind the last layer."""

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
    [*((name, "auto") for name in FORMS), ("llama", "reference"), ("glm4_moe", "reference")],
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


@pytest.mark.parametrize("rule", RULES)
def test_no_token_changes(
    rule: str, with_head: Callable[[str], Headed], engine_args: Make, tiny_tokenizer: Make
) -> None:
    tokenizer = str(tiny_tokenizer("byte_level"))
    args = engine_args(with_head("llama")[0], max_decoding_batch=24, tokenizer=tokenizer)
    requests = requests_of(Sampling(**RULES[rule]))
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


def test_refused(tiny_model: Make, engine_args: Make) -> None:
    args = engine_args(tiny_model("llama").folder)
    with pytest.raises(InvalidConfig, match="has no layer for multi-token prediction") as caught:
        ModelRunner(headed(args, "mtp"))
    assert caught.value.param == "speculative_config"
    recurrent = replace(args, model=str(tiny_model("qwen3_next").folder))
    with pytest.raises(InvalidConfig, match="its layers keep states; ngram and suffix"):
        ModelRunner(headed(recurrent, "mtp"))

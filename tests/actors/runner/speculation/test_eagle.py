"""An EAGLE head of the first version drafts what plain torch says, and changes no token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draft_heads import PlainEagle
from head_checks import PROMPTS, engine_of, finish, headed, requests_of, share_right, watch
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.messages import Sampling
from rayfin.actors.runner.model_runner import ModelRunner

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def plain(tiny_model: Make) -> PlainEagle:
    tiny = tiny_model("llama")
    head = PlainEagle(tiny.model)
    head.fit([[*prompt, *tiny.greedy(prompt, 20)] for prompt in PROMPTS])
    return head


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_drafts_are_those_of_plain_torch(
    attention: str, plain: PlainEagle, tiny_model: Make, engine_args: Make, tmp_path: Path
) -> None:
    plain.save(tmp_path)
    args = engine_args(tiny_model("llama").folder, max_decoding_batch=24, attention=attention)
    for rule in ({}, {"temperature": 0.9}):
        expected = finish(engine_of(args)[0], requests_of(Sampling(**rule)))
        engine, runner = engine_of(headed(args, "eagle", tmp_path))
        seen = watch(runner)
        assert finish(engine, requests_of(Sampling(**rule))) == expected
        assert seen and all(drafts == plain.drafts(text, len(drafts)) for text, drafts in seen)
        assert rule or share_right(engine) > 0.2


def test_refused(tiny_model: Make, engine_args: Make, plain: PlainEagle, tmp_path: Path) -> None:
    args = engine_args(tiny_model("llama").folder)
    plain.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, match in (
        ({"num_hidden_layers": 3}, "is not an EAGLE head"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "is an EAGLE-3 head: method 'eagle3'"),
        ({"speculators_model_type": "eagle"}, "of the speculators library"),
        ({"hidden_size": 64}, "hidden_size 64, and the model has 32"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(InvalidConfig, match=match) as caught:
            ModelRunner(headed(args, "eagle", tmp_path))
        assert caught.value.param == "speculative_config"

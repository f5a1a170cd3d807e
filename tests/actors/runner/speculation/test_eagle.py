"""An EAGLE head of the first version drafts what plain torch says, and changes no token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draft_heads import PlainEagle
from head_checks import PROMPTS, engine_of, finish, headed, requests_of, share_right, watch
from rayfin.actors.config import resolve
from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.actors.messages import Sampling
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.weights.sources import propose
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.version import Vote
from rayfin.deployments.client.weights import DEFAULTS, UpdateOptions, write_version

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


def test_new_weights_of_the_head_alone(
    plain: PlainEagle, tiny_model: Make, engine_args: Make, tmp_path: Path
) -> None:
    """They stay over a version of the model, and are drafted by; tokens are the same."""
    tiny, new, old = tiny_model("llama"), tmp_path / "new", tmp_path / "old"
    for folder, head in ((new, plain), (old, PlainEagle(tiny.model, seed=1))):
        folder.mkdir()
        head.save(folder)
    bare = engine_args(tiny.folder, max_decoding_batch=24)
    args = headed(bare, "eagle", old)
    store, draft = WeightStore(tmp_path / "a" / "b"), UpdateOptions(target="draft")

    def serve(weights: Any, options: UpdateOptions = DEFAULTS) -> Vote:
        version = propose(store, write_version(store, weights, "", args, options))
        vote = runner.vote(version)
        store.commit(version)
        runner.reload(version)
        return vote

    def right() -> float:
        config = resolve(args, *runner.profile())
        engine = Engine(config, InlineExecutor(runner, config))
        assert finish(engine, requests_of(Sampling())) == expected
        return share_right(engine)

    expected = finish(engine_of(bare)[0], requests_of(Sampling()))
    runner = ModelRunner(args)
    before = right()
    assert serve(new, draft) == Vote(False, [])
    after = right()
    assert after > before + 0.1
    vote = serve(str(tiny.folder))
    assert not vote.in_place and not vote.kept and right() == after
    tensors = load_file(old / "model.safetensors")
    named = {f"draft.{name}": own for name, own in tensors.items()}
    serve(named | {"draft.d2t": torch.arange(3)})  # a table of tokens is not read
    assert right() == before
    for weights, match in (
        ({"fc.other": tensors["fc.weight"]}, "nothing that drafts here has a draft.fc.other"),
        ({"fc.weight": tensors["fc.weight"].T.contiguous()}, "draft.fc.weight is "),
    ):
        with pytest.raises(InvalidRequest, match=match):
            runner.vote(write_version(store, weights, "", args, draft))
    with pytest.raises(InvalidRequest, match="no draft model and no head drafts here"):
        write_version(store, tensors, "", bare, draft)


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

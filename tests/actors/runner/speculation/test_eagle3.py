"""An EAGLE-3 head drafts what plain torch says, and changes no token."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draft_heads import LAYERS, PlainEagle3
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
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.messages import Sampling, StopRules
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.speculation.heads import HeadedModel

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def plain(tiny_model: Make) -> PlainEagle3:
    """A head that has learned what the tiny llama says after the prompts."""
    tiny = tiny_model("llama")
    head = PlainEagle3(tiny.model)
    head.fit([[*prompt, *tiny.greedy(prompt, 20)] for prompt in PROMPTS])
    return head


@pytest.fixture(scope="module")
def folder(plain: PlainEagle3, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    plain.save(folder)
    return folder


@pytest.fixture
def args(tiny_model: Make, engine_args: Make, tiny_tokenizer: Make) -> Any:
    tokenizer = str(tiny_tokenizer("byte_level"))
    return engine_args(tiny_model("llama").folder, max_decoding_batch=24, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"attention": "cpu"}, {}),
        ({"attention": "reference"}, {}),
        ({}, {"max_lease": 8}),
        ({}, {"max_batch_tokens": 24}),  # prompts come in chunks
    ],
)
def test_drafts_are_those_of_plain_torch(
    settings: Any, changes: Any, args: Any, folder: Path, plain: PlainEagle3
) -> None:
    batch = changes.pop("max_batch_tokens", args.max_batch_tokens)
    given = headed(replace(args, max_batch_tokens=batch, **settings), "eagle3", folder)
    engine, runner = engine_of(given, **changes)
    seen = watch(runner)
    finish(engine, requests_of(Sampling()))
    assert sum(len(drafts) for _, drafts in seen) > 40
    for text, drafts in seen:
        assert drafts == plain.drafts(text, len(drafts))
    assert share_right(engine) > 0.2


def test_for_recurrent_layers(tiny_model: Make, engine_args: Make, tmp_path: Path) -> None:
    tiny = tiny_model("qwen3_next")
    plain = PlainEagle3(tiny.model)
    plain.fit([[*prompt, *tiny.greedy(prompt, 20)] for prompt in PROMPTS])
    plain.save(tmp_path)
    args = engine_args(tiny.folder, max_decoding_batch=24)
    expected = finish(engine_of(args)[0], requests_of(Sampling()))
    engine, runner = engine_of(headed(args, "eagle3", tmp_path))
    seen = watch(runner)
    assert finish(engine, requests_of(Sampling())) == expected
    assert sum(len(drafts) for _, drafts in seen) > 40
    for text, drafts in seen:
        assert drafts == plain.drafts(text, len(drafts))
    assert share_right(engine) > 0.2


def test_after_a_time_without_drafts(args: Any, folder: Path, plain: PlainEagle3) -> None:
    """The ring was full more than once: nothing is lost."""
    engine, runner = engine_of(headed(args, "eagle3", folder))
    assert runner._execution is not None
    speculator = runner._execution.speculator
    assert speculator is not None
    room, calls = speculator.planner.room, iter(range(1000))
    silent = lambda left, *rest: room(left, *rest) * (next(calls) > 80)  # noqa: E731
    speculator.planner.room = silent  # type: ignore[method-assign]
    seen = watch(runner)
    requests = [
        replace(request, stopping=StopRules(100, frozenset()))
        for request in requests_of(Sampling())
    ]
    finish(engine, requests)
    assert seen and all(drafts == plain.drafts(text, len(drafts)) for text, drafts in seen)


@pytest.mark.parametrize("rule", RULES)
def test_no_token_changes(rule: str, args: Any, folder: Path) -> None:
    requests = ruled(rule)
    expected = finish(engine_of(args)[0], requests)
    for settings in ({}, {"adaptive": True}, {"num_speculative_tokens": 1}):
        assert (
            finish(engine_of(headed(args, "eagle3", folder, **settings))[0], requests) == expected
        )


def test_no_token_changes_in_sixteen_bits(args: Any, folder: Path) -> None:
    args = replace(args, dtype="bfloat16", attention="cpu")
    requests = requests_of(Sampling(temperature=0.7))
    expected = finish(engine_of(args)[0], requests)
    engine, _ = engine_of(headed(args, "eagle3", folder))
    assert finish(engine, requests) == expected and share_right(engine) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 15},  # preempts, and computes again
        {"num_pages": 15, "num_host_pages": 40},  # or swaps
        {"max_lease": 8},
        {"steps_in_flight": 1, "max_lease": 3},
    ],
)
def test_its_layer_goes_with_the_pages(changes: dict[str, int], args: Any, folder: Path) -> None:
    """Requests fork, their prompts are found in the cache, pages are compared."""
    args = replace(args, check_pages=True)
    requests = requests_of(Sampling())
    requests += [replace(requests[1], key=10 + n, parent_key=1) for n in range(2)]
    expected, _ = finish(engine_of(args)[0], requests)
    engine, _ = engine_of(headed(args, "eagle3", folder), **changes)
    assert finish(engine, requests)[0] == expected
    again = finish(engine, requests_of(Sampling(), first=50))[0]
    assert again == {50 + key: expected[key] for key in range(len(PROMPTS))}
    stats = engine.stats()
    assert stats.prefix_hits and share_right(engine) > 0.2
    if "num_pages" in changes:
        assert stats.preemptions and bool(stats.swapped_in) == ("num_host_pages" in changes)


def test_goes_on_from_another_engine(args: Any, folder: Path) -> None:
    """As after a kill: the rest of each request is computed from its tokens."""
    requests = requests_of(Sampling(temperature=0.8, frequency_penalty=0.5))
    expected, _ = finish(engine_of(args)[0], requests)
    for cut in (1, 7):
        rest = [replace(own, output=expected[own.key][:cut]) for own in requests]
        actual, _ = finish(engine_of(headed(args, "eagle3", folder))[0], rest)
        assert {key: expected[key][:cut] + tokens for key, tokens in actual.items()} == expected


def test_the_fused_decoder_stays(args: Any, folder: Path) -> None:
    runner = ModelRunner(headed(args, "eagle3", folder))
    model = runner._loaded.model
    assert isinstance(model, HeadedModel) and isinstance(model.target, CpuDecoder)
    plain = ModelRunner(args)._loaded
    assert len(model.layouts) == len(plain.model.layouts) + 1
    assert runner._loaded.page_bytes(4) > plain.page_bytes(4)
    assert runner._loaded.bytes_beside_pages(2) > 0


def test_refused(args: Any, folder: Path, tmp_path: Path, tiny_model: Make) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "m.safetensors")

    def refused(match: str, drop: str = "", **changes: Any) -> None:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        kept = {name: weight for name, weight in weights.items() if name != drop}
        save_file(kept, tmp_path / "m.safetensors")
        with pytest.raises(InvalidConfig, match=match) as caught:
            ModelRunner(headed(args, "eagle3", tmp_path))
        assert caught.value.param == "speculative_config"

    refused("vocab_size 99, and the model has 128", vocab_size=99)
    refused("hidden_size 64, and the model has 32", hidden_size=64)
    refused("one layer of the Llama kind", num_hidden_layers=2)
    refused("not an EAGLE-3 head", architectures=["LlamaForCausalLM"])
    refused("speculator of type 'eagle'", speculators_model_type="eagle")
    refused("lacks 1 weights, fc.weight", drop="fc.weight")
    refused("lacks d2t", drop="d2t")
    ids = {"eagle_aux_hidden_state_layer_ids": [*LAYERS[:2], 3]}
    refused("reads layer 3, and the model has 3", eagle_config=ids)
    with pytest.raises(InvalidConfig, match="no folder /nowhere"):
        ModelRunner(headed(args, "eagle3", Path("/nowhere")))
    with pytest.raises(InvalidConfig, match="not an EAGLE-3 head"):
        ModelRunner(headed(args, "eagle3", tiny_model("llama").folder))

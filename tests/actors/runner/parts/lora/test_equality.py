"""Base and three adapters in one batch: greedy tokens equal peft's, however the steps are cut."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peft_adapters import KINDS, generate, make_adapter, ref_of
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import BeamParams
from rayfin.actors.runner.parts.lora.load import AdaptersPart

Make = Callable[..., Any]
OUTPUT = 10
PROMPTS = {
    "": [5, 9, 3, 5, 9, 3, 77, 20, 11],
    "small": [5, 9, 3, 5, 9, 3, 77, 20, 11],
    "rslora": [7, 7, 60, 2, 44, 90, 100, 3, 3, 3, 8, 1, 55],
    "mixed": [11, 12],
}
MODELS = ["llama", "qwen3", "phi3", "gpt2", "olmo2"]


@pytest.fixture(scope="session")
def adapters(tiny_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """architecture -> (the adapters' folders by kind, peft's tokens by kind)."""

    @functools.cache
    def make(architecture: str) -> tuple[dict[str, Path], dict[str, list[int]]]:
        model = tiny_model(architecture).folder
        folders = {
            kind: make_adapter(model, tmp_path_factory.mktemp(kind), seed, **settings)
            for seed, (kind, settings) in enumerate(KINDS.items())
        }
        tokens = {
            kind: generate(model, folders.get(kind), prompt, OUTPUT)
            for kind, prompt in PROMPTS.items()
        }
        assert tokens["small"] != tokens[""], "the adapter changes nothing"
        return folders, tokens

    return make


def requests(request_of: Make, folders: dict[str, Path]) -> list[Any]:
    made = []
    for key, (kind, prompt) in enumerate(PROMPTS.items()):
        request = request_of(key, prompt, OUTPUT)
        if kind:
            request.use(ref_of(folders[kind], kind))
        made.append(request)
    return made


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 8}, {"attention": "torch"}])
def test_tokens_equal_pefts(
    adapters: Make,
    tiny_model: Make,
    served: Make,
    request_of: Make,
    family: str,
    settings: dict[str, Any],
) -> None:
    folders, expected = adapters(family)
    server = served(tiny_model(family).folder, enable_lora=True, **settings)
    tokens = server.run(*requests(request_of, folders), stagger=1)
    assert not server.errors
    assert dict(zip(PROMPTS, tokens.values(), strict=True)) == expected


def test_preempted_ones(adapters: Make, tiny_model: Make, served: Make, request_of: Make) -> None:
    """Pages for two of the four at most."""
    folders, expected = adapters("llama")
    server = served(tiny_model("llama").folder, enable_lora=True, num_pages=9, max_model_len=32)
    tokens = server.run(*requests(request_of, folders))
    assert dict(zip(PROMPTS, tokens.values(), strict=True)) == expected
    assert server.engine.stats().preemptions > 0


def test_forks_and_beams_compute_with_the_adapter(
    adapters: Make, tiny_model: Make, served: Make, request_of: Make
) -> None:
    folders, expected = adapters("llama")
    server = served(tiny_model("llama").folder, enable_lora=True)
    ref = ref_of(folders["small"])
    first, second, search = (request_of(key, PROMPTS["small"], OUTPUT) for key in range(3))
    second.parent_key = first.key
    search.beams = BeamParams(1)
    for request in (first, second, search):
        request.use(ref)
    tokens = server.run(first, second, search)
    assert tokens[0] == tokens[1] == expected["small"]
    assert server.hypotheses[2][0].tokens == expected["small"]


def test_pages_are_of_an_adapters_content(
    adapters: Make, tiny_model: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    """Pages of the base or another adapter never match; equal weights of another name do."""
    folders, expected = adapters("llama")
    model = tiny_model("llama").folder
    server = served(model, enable_lora=True)
    prompt, small = PROMPTS["small"], ref_of(folders["small"], "a")
    cached = []
    for key, ref in enumerate([None, small, ref_of(folders["rslora"]), small, None]):
        request = request_of(key, prompt, 2)
        if ref is not None:
            request.use(dataclasses.replace(ref, name=f"name {key}"))
        server.run(request)
        cached.append(server.cached[key])
    assert cached == [0, 0, 0, 8, 8]


def test_at_most_so_many_adapters_run_at_once(
    adapters: Make, tiny_model: Make, served: Make, request_of: Make
) -> None:
    folders, expected = adapters("llama")
    server = served(tiny_model("llama").folder, max_loras=1, max_cpu_loras=1)
    tokens = server.run(*requests(request_of, folders))
    assert dict(zip(PROMPTS, tokens.values(), strict=True)) == expected
    kinds = {frozenset(server._keys[info.epoch, info.step].values()) - {0} for info in server.steps}
    assert all(len(own) <= 1 for own in kinds)
    assert len(server.runner._loaded.part(AdaptersPart).store) == 1


def test_with_8_bit_weights_and_bfloat16(
    adapters: Make, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """The base rows' tokens are those of a server without adapters, bit for bit."""
    folders, _ = adapters("llama")
    for settings in ({"quantization": "int8"}, {"dtype": "bfloat16"}):
        plain = served(tiny_model("llama").folder, enable_lora=True, **settings)
        alone = plain.run(request_of(0, PROMPTS[""], OUTPUT))[0]
        tokens = plain.run(*requests(request_of, folders))
        assert tokens[0] == alone
        assert tokens[1] != alone


def test_a_runner_that_is_replaced_reads_them_again(
    adapters: Make, tiny_model: Make, served: Make, request_of: Make
) -> None:
    folders, expected = adapters("llama")
    server = served(tiny_model("llama").folder, enable_lora=True)
    made = requests(request_of, folders)
    for request in made:
        server.engine.add(request)
    tokens: dict[int, list[int]] = {request.key: [] for request in made}
    for step in range(200):
        if step == 6:
            server.runner._loaded.part(AdaptersPart).store._adapters.clear()
            server.engine.replace_runners(RunnerGroupFailed("planted"))
        for deltas in server.engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
        if not server.engine.has_work:
            break
    assert dict(zip(PROMPTS, tokens.values(), strict=True)) == expected


def test_an_adapter_that_is_gone_fails_its_rows_alone(
    adapters: Make, tiny_model: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    folders, expected = adapters("llama")
    server = served(tiny_model("llama").folder, enable_lora=True)
    base, lost = requests(request_of, folders)[:2]
    adapter = lost.part(AdapterRef)
    assert adapter is not None
    lost.parts = (dataclasses.replace(adapter, path=str(tmp_path / "gone")),)
    server.engine.lifecycle.preparations._known[bytes.fromhex(adapter.digest)] = None
    server.runner._model.forward = server._forward  # records whole steps only
    tokens = server.run(base, lost)
    assert tokens == {0: expected[""], 1: []}
    assert "cannot be used: No adapter at" in server.errors[1]


def test_without_the_flag_it_is_refused(
    adapters: Make, tiny_model: Make, served: Make, request_of: Make
) -> None:
    folders, _ = adapters("llama")
    server = served(tiny_model("llama").folder)
    with pytest.raises(Exception, match="--enable-lora"):
        server.engine.add(requests(request_of, folders)[1])

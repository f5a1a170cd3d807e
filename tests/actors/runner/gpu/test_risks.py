"""What no interpreter shows: races of kernels that overlap, graphs at the ends of their buckets.

docs/benchmarks/gpu.md lists the risks, and which test covers which.
"""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import Sampling
from rayfin.actors.scheduler.policy import multi_step

pytest.importorskip("triton")
from rayfin.actors.runner.gpu.prompt_graphs import token_buckets
from rayfin.kernels.triton.trials import NAMES

Make = Callable[..., Any]
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)


@pytest.fixture
def on_gpu(served: Make) -> Make:
    """An engine on the GPU whose steps no recording of logits takes from the graphs."""

    def make(folder: Any, **settings: Any) -> Any:
        settings = {"max_lease": 8, "num_pages": 800, "kv_cache_memory": 10**8} | settings
        engine = served(folder, device="cuda", **settings)
        engine.runner._model.forward, engine.runner._forward.run = engine._forward, engine._advance
        return engine

    return make


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_kernels_that_start_early_say_the_same(
    rows: int,
    two_layers: Any,
    on_gpu: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Items and page tables are read before the wait: a race would show within many steps."""
    tokens = []
    for early, times in (("0", 1), ("1", 20)):
        monkeypatch.setenv("RAYFIN_PDL", early)
        engine = on_gpu(two_layers.folder, max_decoding_batch=4, max_lease=16)
        for _ in range(times):
            requests = [
                request_of(key, [5 + key, 9, 3], 240, sampling=Sampling(temperature=0.9, seed=key))
                for key in range(rows)
            ]
            tokens.append(engine.run(*requests))
        launches = engine.runner._graphs._state.launches._graph_launches.values()
        assert launches and not any(each.launch.arrived.any() for each in launches)
    assert all(each == tokens[0] for each in tokens[1:])
    assert all(len(each) == 240 for each in tokens[0].values())


def test_prompts_at_the_ends_of_their_buckets(
    two_layers: Any, on_gpu: Make, request_of: Make
) -> None:
    lengths = sorted(
        {size + more for size in token_buckets(192, 64) for more in (-1, 0, 1) if size > 1}
    )
    tokens = {}
    for eager in (True, False):
        engine = on_gpu(two_layers.folder, enforce_eager=eager, max_batch_tokens=192)
        for length in lengths:
            prompt = [3 + i * 7 % 50 for i in range(length)]
            tokens[eager, length] = engine.run(request_of(length, prompt, 3))[length]
    assert all(tokens[True, length] == tokens[False, length] for length in lengths)


def test_more_prompts_than_graphs_have_tiles(
    two_layers: Any, on_gpu: Make, request_of: Make
) -> None:
    """Prompts of one token and of some, alone and beside others: the layers of some are eager."""
    tokens = []
    for eager in (True, False):
        engine = on_gpu(
            two_layers.folder, enforce_eager=eager, max_decoding_batch=64, max_batch_tokens=512
        )
        lengths = [1 + (5 * key) % 9 for key in range(56)]
        prompts = {key: [3 + (key + i) % 50 for i in range(n)] for key, n in enumerate(lengths)}
        tokens.append(engine.run(*(request_of(key, each, 6) for key, each in prompts.items())))
    assert tokens[0] == tokens[1]


def test_the_largest_prompts_of_graphs(
    tiny_models: Any, tmp_path: Path, on_gpu: Make, request_of: Make
) -> None:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 4096}
    folder, tokens = tiny_models.TinyModel("qwen3", tmp_path, **sizes).folder, []
    for eager in (True, False):
        engine = on_gpu(
            folder,
            num_pages=900,
            enforce_eager=eager,
            max_batch_tokens=3200,
            max_model_len=3400,
        )
        prompts = [[3 + i * 7 % 50 for i in range(length)] for length in (3071, 3072, 3073)]
        tokens.append([engine.run(request_of(0, prompt, 2))[0] for prompt in prompts])
    assert tokens[0] == tokens[1]


def test_drafts_in_graphs(two_layers: Any, on_gpu: Make, request_of: Make) -> None:
    tokens = []
    for method in ("none", "ngram"):
        written = {"method": method}
        if method == "ngram":
            written |= {"num_speculative_tokens": 3, "adaptive": False}
        config = json.dumps(written)
        engine = on_gpu(two_layers.folder, speculative_config=config, max_decoding_batch=4)
        prompts = [[5, 9, 3, 5, 9, 3, 5 + key] for key in range(4)]
        tokens.append(engine.run(*(request_of(k, each, 60) for k, each in enumerate(prompts))))
    assert tokens[0] == tokens[1]


def test_many_queued_rows_that_end_at_random(
    two_layers: Any, on_gpu: Make, request_of: Make
) -> None:
    """256 rows: stop tokens, freed slots, and pages that other requests take at once."""
    tokens = []
    for eager in (True, False):
        random = Random(5)
        engine = on_gpu(
            two_layers.folder,
            num_pages=2200,
            enforce_eager=eager,
            max_decoding_batch=256,
            max_batch_tokens=512,
        )
        requests = []
        for key in range(600):
            prompt = [random.randrange(3, 60) for _ in range(random.randrange(1, 30))]
            sampling = Sampling(temperature=random.choice([0.0, 0.8, 1.3]), seed=key)
            stops = random.sample(range(60), 3)
            length = random.randrange(1, 40)
            requests.append(request_of(key, prompt, length, eos=stops, sampling=sampling))
        tokens.append(engine.run(*requests))
    assert tokens[0] == tokens[1]


def test_fp8_pages_in_graphs(two_layers: Any, on_gpu: Make, request_of: Make) -> None:
    """A prefix that is found again, and pages that were swapped out: the tokens of eager steps."""
    tokens = []
    for eager in (True, False):
        engine = on_gpu(
            two_layers.folder,
            enforce_eager=eager,
            kv_cache_dtype="fp8_e4m3",
            preemption="swap",
            num_pages=40,
            max_model_len=80,
        )
        prompt = [3 + i * 7 % 50 for i in range(33)]
        first = engine.run(request_of(9, prompt, 8))
        again = engine.run(*(request_of(key, [*prompt, 4 + key], 24) for key in range(6)))
        assert engine.cached[9] == 0 and any(engine.cached[key] for key in range(6))
        assert engine.engine.stats().preemptions > 0
        tokens.append((first, again))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_mixtures_in_graphs_with_padded_rows(
    rows: int, tiny_model: Make, on_gpu: Make, request_of: Make
) -> None:
    tiny = tiny_model("mixtral")
    engine = on_gpu(tiny.folder, max_decoding_batch=40, max_batch_tokens=64)
    prompts = {key: [3 + key, 9, 4 + key % 5] for key in range(rows)}
    given = engine.run(*(request_of(key, prompt, 6) for key, prompt in prompts.items()))
    for key in list(prompts)[:8]:
        assert given[key] == tiny.greedy(prompts[key], 6)


def test_one_of_two_engines_goes_on(two_layers: Any, on_gpu: Make, request_of: Make) -> None:
    """They are recorded beside each other; one sleeps, and the other is right before and after."""
    first, second = (on_gpu(two_layers.folder) for _ in range(2))
    wanted = first.run(request_of(0, [5, 6, 7], 200))
    assert second.run(request_of(0, [5, 6, 7], 200)) == wanted
    second.runner.sleep()
    assert first.run(request_of(0, [5, 6, 7], 200)) == wanted
    second.engine.replace_runners(RunnerGroupFailed("asleep"))
    second.runner._model.forward, second.runner._forward.run = second._forward, second._advance
    assert second.run(request_of(1, [5, 6, 7], 200))[1] == wanted[0]
    assert first.run(request_of(0, [5, 6, 7], 200)) == wanted


def test_forms_that_are_tried_say_the_same(
    two_layers: Any, on_gpu: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 they differ in the order of sums alone."""
    tokens = []
    for tried in ("", ",".join(NAMES)):
        monkeypatch.setenv("RAYFIN_TRY", tried)
        engine = on_gpu(two_layers.folder, max_decoding_batch=8, max_batch_tokens=256)
        prompts = {key: [3 + i * (key + 2) % 50 for i in range(20 * key + 1)] for key in range(8)}
        tokens.append(engine.run(*(request_of(key, each, 40) for key, each in prompts.items())))
    assert tokens[0] == tokens[1]

"""The runner's own promises: sampling that repeats, rows that fail alone, steps in order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.config import DEFAULT_BATCH_TOKENS, BatchLimits, resolve
from rayfin.actors.errors import EngineUnavailable, Fenced, InvalidConfig, RunnerGroupFailed
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.loading import pick_device
from rayfin.actors.runner.memory import largest_step, total_host_bytes
from rayfin.actors.runner.model_runner import ModelRunner

Make = Callable[..., Any]
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 1, 16, 9))]


def _random_request(request_of: Make, key: int, max_tokens: int = 20) -> Any:
    sampling = Sampling(temperature=1.2, top_k=(0, 20)[key % 2], top_p=0.95, seed=1000 + key)
    return request_of(key, PROMPTS[key], max_tokens, sampling=sampling)


def test_seeded_sampling_is_the_same_everywhere(
    tiny_model: Make, served: Make, request_of: Make
) -> None:
    """I19: alone, in a batch, in chunks, under V0, and after preemptions."""
    folder = tiny_model("llama").folder
    alone: dict[int, list[int]] = {}
    for key in range(5):
        alone |= served(folder).run(_random_request(request_of, key))
    assert len({tuple(tokens) for tokens in alone.values()}) == 5

    def together(**args: Any) -> Any:
        engine = served(folder, **args)
        assert engine.run(*(_random_request(request_of, key) for key in range(5))) == alone
        return engine.engine.stats()

    together()
    together(max_batch_tokens=8)
    together(scheduler="v0", max_model_len=40)
    assert together(num_pages=10, max_model_len=40).preemptions > 0


def test_seed_matters(tiny_model: Make, served: Make, request_of: Make) -> None:
    folder = tiny_model("llama").folder
    runs = []
    for seed in (1, 1, 2):
        sampling = Sampling(temperature=1.0, seed=seed)
        runs.append(served(folder).run(request_of(0, [5, 6, 7], 20, sampling=sampling))[0])
    assert runs[0] == runs[1] != runs[2]


def test_crash_and_replay_give_the_same_tokens(
    tiny_model: Make, served: Make, request_of: Make
) -> None:
    folder = tiny_model("llama").folder
    expected = served(folder).run(*(_random_request(request_of, key) for key in range(5)))
    engine = served(folder)
    execute, calls = engine.runner.execute, 0

    def dies_sometimes(info: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 11):
            raise RunnerGroupFailed("the runner died")
        return execute(info)

    engine.runner.execute = dies_sometimes
    assert engine.run(*(_random_request(request_of, key) for key in range(5))) == expected
    assert engine.executor.epoch == 2


def test_min_tokens(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Banned tokens do not come before their position, and the other rows do not care."""
    tiny, prompt = tiny_model("llama"), PROMPTS[0]
    free = tiny.logits(prompt)[-1].argsort(descending=True).tolist()
    best, second = free[:2]
    banned = Sampling(banned=(best,), banned_until=len(prompt) + 1)
    engine = served(tiny.folder)
    tokens = engine.run(
        request_of(0, prompt, 6, sampling=banned, eos=[best]), request_of(1, prompt, 6)
    )
    assert tokens[0][0] == second
    assert tokens[1][0] == best
    long = Sampling(banned=(best, second), banned_until=len(prompt) + 20)
    tokens = engine.run(request_of(2, prompt, 20, sampling=long, eos=[best, second]))
    assert len(tokens[2]) == 20 and not {best, second} & set(tokens[2])


def test_ban_ends_where_it_says(tiny_model: Make, served: Make, request_of: Make) -> None:
    """With min_tokens m the tokens 0 .. m - 1 of the output are protected, m is not."""
    tiny, prompt = tiny_model("llama"), PROMPTS[1]
    for minimum in range(5):
        everything_but_9 = tuple(token for token in range(128) if token != 9)
        sampling = Sampling(banned=everything_but_9, banned_until=len(prompt) + minimum)
        tokens = served(tiny.folder).run(request_of(0, prompt, 6, sampling=sampling))[0]
        assert tokens[:minimum] == [9] * minimum
        expected = tiny.logits(prompt + [9] * minimum)[-1].argmax()
        assert tokens[minimum] == expected


POISON = 77  # a token whose embedding is NaN: a row that reads it has NaN logits from there on


@pytest.fixture(params=["auto", "torch"])
def poisoned(
    request: pytest.FixtureRequest, tiny_model: Make, served: Make, poison: Make
) -> Callable[..., Any]:
    def make(**args: Any) -> Any:
        engine = served(tiny_model("llama").folder, attention=request.param, **args)
        poison(engine, POISON)
        return engine

    return make


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
def test_bad_logits_fail_their_row_alone(
    scheduler: str, poisoned: Make, tiny_model: Make, request_of: Make
) -> None:
    tiny = tiny_model("llama")
    engine = poisoned(scheduler=scheduler, max_model_len=40)
    prompts = [PROMPTS[0], [3, 4, POISON, 5], PROMPTS[3]]
    tokens = engine.run(*(request_of(key, prompt, 6) for key, prompt in enumerate(prompts)))
    assert tokens[1] == [] and engine.reasons[1] == "error"
    assert "not finite" in engine.errors[1]
    for key in (0, 2):
        assert tokens[key] == tiny.greedy(prompts[key], 6)
        assert engine.reasons[key] == "length"


def test_pages_of_a_failed_row_harm_nobody(
    poisoned: Make, tiny_model: Make, request_of: Make
) -> None:
    """They hold NaN when the next request gets them."""
    tiny = tiny_model("llama")
    engine = poisoned(num_pages=10, max_model_len=40)
    for key in range(3):
        engine.run(request_of(key, [POISON] * 39, 1))
    assert set(engine.reasons.values()) == {"error"}
    keys, _ = engine.runner._mover._pairs[0]
    assert keys.isnan().any()
    for key, prompt in enumerate(PROMPTS, start=10):
        assert engine.run(request_of(key, prompt, 12))[key] == tiny.greedy(prompt, 12)


def test_steps_of_another_epoch_are_refused(
    tiny_model: Make, engine_args: Make, step_of: Make, row: Make
) -> None:
    args = engine_args(tiny_model("llama").folder)
    runner = ModelRunner(args)
    config = resolve(args, *runner.profile())
    runner.start(config, epoch=3)
    one = row(0, [5, 6], new_pages=[0])
    new = [NewRequest(0, Sampling(), 100)]
    for epoch, step in ((2, 0), (4, 0), (3, 1), (3, -1)):
        kind = Fenced if epoch < 3 else EngineUnavailable  # an old scheduler learns that it is old
        with pytest.raises(kind, match=rf"{epoch}.{step} refused"):
            runner.execute(step_of(one, epoch=epoch, step=step, new=new))
    result = runner.execute(step_of(one, epoch=3, step=0, new=new))
    assert (result.epoch, result.step) == (3, 0) and result.tokens[0, 0] >= 0
    assert result.seconds > 0
    with pytest.raises(EngineUnavailable):  # a step is never repeated
        runner.execute(step_of(one, epoch=3, step=0, new=new))
    runner.start(config, epoch=4)
    again = runner.execute(step_of(one, epoch=4, step=0, new=new))
    assert again.tokens.tolist() == result.tokens.tolist()


def test_nothing_runs_before_start(
    tiny_model: Make, engine_args: Make, step_of: Make, row: Make
) -> None:
    runner = ModelRunner(engine_args(tiny_model("llama").folder))
    with pytest.raises(EngineUnavailable):
        runner.execute(step_of(row(0, [5], new_pages=[0]), new=[NewRequest(0, Sampling(), 100)]))


def test_mid_prompt_chunk_samples_nothing(
    tiny_model: Make, engine_args: Make, step_of: Make, row: Make
) -> None:
    args = engine_args(tiny_model("llama").folder)
    runner = ModelRunner(args)
    runner.start(resolve(args, *runner.profile()), epoch=0)
    info = step_of(
        row(0, [5, 6], new_pages=[0], samples=False), new=[NewRequest(0, Sampling(), 100)]
    )
    assert runner.execute(info).tokens.tolist() == [[-1]]


@pytest.mark.parametrize(
    "tokens, rows, model_len, lengths",
    [
        (16, 8, 100, [16]),
        (17, 8, 17, [17]),
        (40, 8, 16, [16, 16, 8]),
        (1000, 3, 16, [16, 16, 16]),  # more tokens than the rows can bring
        (1, 1, 1, [1]),
    ],
)
def test_largest_step(tokens: int, rows: int, model_len: int, lengths: list[int]) -> None:
    """It is a step like others, and no prompt is longer than a request may be."""
    limits = BatchLimits(max_batch_tokens=tokens, max_decoding_batch=rows, max_prefill_batch=16)
    info, pages = largest_step(limits, 4, model_len)
    assert info.chunk_len.tolist() == lengths
    assert info.chunk_idx.tolist() == [sum(lengths[:i]) for i in range(len(lengths))]
    assert len(info.merge_prompt) == sum(lengths)
    assert pages.tolist() == [-(-length // 4) for length in lengths] == info.kv_page_len.tolist()
    assert len(set(info.new_pages.tolist())) == pages.sum()


@pytest.mark.parametrize("architecture_", ["llama", "gpt2", "deepseek_v3"])
def test_profile(architecture_: str, tiny_model: Make, engine_args: Make) -> None:
    tiny = tiny_model(architecture_)
    args = engine_args(tiny.folder, kv_cache_memory=None, max_batch_tokens=None)
    runner = ModelRunner(args)
    facts, limits = runner.profile()
    assert facts.architecture == tiny.model.config.architectures[0]
    assert (facts.vocab_size, facts.max_position) == (128, 256)
    assert 0 < facts.available_bytes < total_host_bytes() * 0.4
    assert limits.max_batch_tokens == DEFAULT_BATCH_TOKENS["cpu"]
    assert limits.max_decoding_batch == 8
    config = resolve(args, facts, limits)
    assert config.num_pages == 8 * 256 // 4 and config.max_model_len == 256


def test_page_bytes(tiny_model: Make, engine_args: Make) -> None:
    """2 x layers x page_size x kv_heads x head_dim x dtype size; latent attention apart."""

    def page_bytes(name: str, **args: Any) -> int:
        return int(
            ModelRunner(engine_args(tiny_model(name).folder, **args)).profile()[0].page_bytes
        )

    assert page_bytes("llama") == 2 * 3 * 4 * 2 * 8 * 4
    assert page_bytes("llama", page_size=16, dtype="bfloat16") == 2 * 3 * 16 * 2 * 8 * 2
    assert page_bytes("deepseek_v3") == 3 * 4 * 4 * ((8 + 8) + 12) * 4


def test_utilization_bounds_the_pages(tiny_model: Make, engine_args: Make) -> None:
    folder = tiny_model("llama").folder
    available = [
        ModelRunner(engine_args(folder, kv_cache_memory=None, memory_utilization=share))
        .profile()[0]
        .available_bytes
        for share in (0.5, 0.25)
    ]
    difference = available[0] - available[1]
    assert difference == pytest.approx(total_host_bytes() * 0.25, rel=0.1)


def test_bfloat16_runs(tiny_model: Make, served: Make, request_of: Make) -> None:
    engine = served(tiny_model("llama").folder, dtype="bfloat16")
    tokens = engine.run(*(request_of(key, prompt, 8) for key, prompt in enumerate(PROMPTS)))
    assert engine.runner._model.dtype == torch.bfloat16
    assert all(len(own) == 8 for own in tokens.values())
    exact = tiny_model("llama").logits(PROMPTS[3])[-1]
    torch.testing.assert_close(engine.sampled[3][16].float(), exact, atol=0.2, rtol=0.1)


def test_auto_dtype_on_a_cpu_is_float32(tiny_model: Make, engine_args: Make) -> None:
    runner = ModelRunner(engine_args(tiny_model("llama").folder, dtype="auto"))
    assert runner._model.dtype == torch.float32


def test_dummy_weights(tiny_model: Make, served: Make, request_of: Make) -> None:
    def logits(seed: int) -> np.ndarray:
        engine = served(tiny_model("llama").folder, load_format="dummy", seed=seed)
        engine.run(request_of(0, PROMPTS[0], 1))
        return np.asarray(engine.sampled[0][len(PROMPTS[0])])

    assert (logits(1) == logits(1)).all()
    assert (logits(1) != logits(2)).any()


def test_pick_device() -> None:
    assert pick_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert pick_device("auto").type == "cpu"
        with pytest.raises(InvalidConfig) as caught:
            pick_device("cuda")
        assert caught.value.param == "device"


def test_unknown_attention_backend(tiny_model: Make, engine_args: Make) -> None:
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args(tiny_model("llama").folder, attention="magic"))
    assert caught.value.param == "attention"

"""--activations bfloat16: rows are rounded in front of 16-bit weights."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.loading import load
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels

Make = Callable[..., Any]
PROMPTS = [[5, 9, 2, 7, 1], [3] * 30, list(range(1, 20))]


@pytest.fixture
def rounds() -> None:
    kernels = try_kernels(1)
    if kernels is None or not kernels.round_rows():
        pytest.skip("this machine multiplies bfloat16 no faster")


@pytest.mark.usefixtures("rounds")
def test_logits_are_near_and_tokens_those_of_any_batch(
    tiny_model: Make, served: Make, request_of: Make
) -> None:
    folder = tiny_model("llama").folder
    requests = [request_of(key, prompt, 8) for key, prompt in enumerate(PROMPTS)]
    settings = {"dtype": "bfloat16", "activations": "bfloat16"}
    rounded = served(folder, **settings)
    tokens = rounded.run(*requests)
    again = served(folder, max_batch_tokens=9, **settings)
    assert again.run(*requests, stagger=2) == tokens
    exact = served(folder, dtype="bfloat16")
    exact.run(request_of(0, PROMPTS[0], 1))
    (position, expected), *_ = exact.sampled[0].items()
    difference = (rounded.sampled[0][position] - expected).norm() / expected.norm()
    assert 0 < float(difference) < 0.02


def test_where_it_does_nothing_it_says_so(
    tiny_model: Make,
    engine_args: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = engine_args(tiny_model("llama").folder, dtype="bfloat16", activations="bfloat16")
    monkeypatch.setattr(CpuKernels, "round_rows", lambda self: False)
    load(args)
    assert "activations 'bfloat16' has no effect" in caplog.text


def test_without_kernels_it_is_refused(tiny_model: Make, engine_args: Make) -> None:
    folder = tiny_model("llama").folder
    with pytest.raises(InvalidConfig, match="compiled CPU kernels") as caught:
        load(engine_args(folder, activations="bfloat16", attention="torch"))
    assert caught.value.param == "activations"

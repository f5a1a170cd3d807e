"""Pages of another type than the model's: room for more tokens, which are rounded and no more."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.kernels.cpu.library import try_load

Make = Callable[..., Any]
PROMPTS = {0: list(range(5, 24)), 1: list(range(40, 71)), 2: [7, 100, 9]}
OUTPUT = 10


class RoundedCache(DynamicCache):
    """transformers' own cache, which gives back what it was given as bfloat16 keeps it."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *place: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = [x.bfloat16().float() for x in (keys, values)]
        return super().update(rounded[0], rounded[1], *place, **options)


@torch.inference_mode()
def rounded_greedy(model: Any, prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the logits [OUTPUT, V] that they are the highest of."""
    cache, tokens, logits = RoundedCache(), list(prompt), []
    fed = tokens
    for _ in range(OUTPUT):
        out = model(torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1]
        logits.append(out)
        fed = [int(out.argmax())]
        tokens += fed
    return tokens[len(prompt) :], torch.stack(logits)


@pytest.mark.parametrize("attention", ["auto", "torch", "reference"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])  # fused, and layer by layer
def test_bfloat16_pages_of_a_float32_model(
    family: str, attention: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """The tokens and logits of transformers with a rounded cache, and not those without."""
    tiny = tiny_model(family)
    engine = served(tiny.folder, kv_cache_dtype="bfloat16", attention=attention)
    tokens = engine.run(*(request_of(key, prompt, OUTPUT) for key, prompt in PROMPTS.items()))
    for key, prompt in PROMPTS.items():
        wanted, logits = rounded_greedy(tiny.model, prompt)
        assert tokens[key] == wanted
        given = torch.stack([engine.sampled[key][len(prompt) + i] for i in range(OUTPUT)])
        torch.testing.assert_close(given, logits, rtol=1e-4, atol=1e-4)
        exact = tiny.logits([*prompt, *wanted])[len(prompt) - 1 : -1]
        assert (given - exact).abs().max() > 1e-3


def test_half_the_bytes_are_twice_the_pages(tiny_model: Make, served: Make) -> None:
    """Of one budget; swapped pages are of the same type."""
    folder = tiny_model("qwen3").folder
    engines = {
        name: served(
            folder,
            kv_cache_dtype=name,
            kv_cache_memory=99 * 4608,
            max_decoding_batch=24,
            preemption="swap",
        )
        for name in ("auto", "float32", "bfloat16")
    }
    pages = {name: engine.config.num_pages for name, engine in engines.items()}
    page_bytes = {name: engine.runner.profile()[0].page_bytes for name, engine in engines.items()}
    assert page_bytes["auto"] == page_bytes["float32"] == 2 * page_bytes["bfloat16"]
    assert pages["bfloat16"] == 2 * pages["float32"] == 2 * pages["auto"] > 0
    for page, host in engines["bfloat16"].runner._mover._pairs:
        assert page.dtype == host.dtype == torch.bfloat16


def test_swapped_pages_come_back(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Requests that gave way to others go on as if nothing had been."""
    tiny = tiny_model("qwen3")
    engine = served(
        tiny.folder, kv_cache_dtype="bfloat16", preemption="swap", num_pages=18, max_model_len=48
    )
    tokens = engine.run(*(request_of(key, prompt, OUTPUT) for key, prompt in PROMPTS.items()))
    assert engine.engine.stats().preemptions > 0
    for key, prompt in PROMPTS.items():
        assert tokens[key] == rounded_greedy(tiny.model, prompt)[0]


def test_pages_that_the_attention_does_not_read(tiny_model: Make, engine_args: Make) -> None:
    folder = tiny_model("llama").folder
    ModelRunner(engine_args(folder, kv_cache_dtype="float16", attention="torch"))
    if try_load() is None:
        pytest.skip("the CPU kernels are not built")
    with pytest.raises(InvalidConfig, match="float32 or bfloat16") as caught:
        ModelRunner(engine_args(folder, kv_cache_dtype="float16"))
    assert caught.value.param == "kv_cache_dtype"

"""Pages of another type than the model's: room for more tokens, which are rounded and no more."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.scheduler.policy import multi_step
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.cpu.library import try_load
from rayfin.kernels.sampling import select as sampling_select

pytestmark = pytest.mark.slow(reason="runs Triton kernels in the interpreter")

Make = Callable[..., Any]
PROMPTS = {0: list(range(5, 24)), 1: list(range(40, 71)), 2: [7, 100, 9]}
OUTPUT = 10
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
TOLERANCE = {"bfloat16": 1e-4, "fp8": 5e-3}
"""Of logits: room for a number between two others that went the other way."""


class RoundedCache(DynamicCache):
    """transformers' own cache, which gives back what it was given as another type keeps it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.page_type = dtype

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *place: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = [x.to(self.page_type).float() for x in (keys, values)]
        return super().update(rounded[0], rounded[1], *place, **options)


@torch.inference_mode()
def rounded_greedy(
    model: Any, prompt: Sequence[int], name: str, output: int = OUTPUT
) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the logits [output, V] that they are the highest of."""
    cache, tokens, logits = RoundedCache(DTYPES[name]), list(prompt), []
    fed = tokens
    for _ in range(output):
        out = model(torch.tensor([fed]), past_key_values=cache, use_cache=True).logits[0, -1]
        logits.append(out)
        fed = [int(out.argmax())]
        tokens += fed
    return tokens[len(prompt) :], torch.stack(logits)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("bfloat16", "auto"),
        ("bfloat16", "torch"),
        ("bfloat16", "reference"),
        ("fp8", "torch"),
        ("fp8", "reference"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])  # fused, and layer by layer
def test_smaller_pages_of_a_float32_model(
    family: str, name: str, attention: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """The tokens and logits of transformers with a rounded cache, and not those without."""
    tiny = tiny_model(family)
    engine = served(tiny.folder, kv_cache_dtype=name, attention=attention)
    tokens = engine.run(*(request_of(key, prompt, OUTPUT) for key, prompt in PROMPTS.items()))
    for key, prompt in PROMPTS.items():
        wanted, logits = rounded_greedy(tiny.model, prompt, name)
        assert tokens[key] == wanted
        given = torch.stack([engine.sampled[key][len(prompt) + i] for i in range(OUTPUT)])
        torch.testing.assert_close(given, logits, rtol=TOLERANCE[name], atol=TOLERANCE[name])
        exact = tiny.logits([*prompt, *wanted])[len(prompt) - 1 : -1]
        assert (given - exact).abs().max() > 10 * TOLERANCE[name]


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
            attention="torch" if name == "fp8" else "auto",
        )
        for name in ("auto", "float32", "bfloat16", "fp8")
    }
    pages = {name: engine.config.num_pages for name, engine in engines.items()}
    page_bytes = {name: engine.runner.profile()[0].page_bytes for name, engine in engines.items()}
    assert page_bytes["auto"] == page_bytes["float32"] == 2 * page_bytes["bfloat16"]
    assert pages["bfloat16"] == 2 * pages["float32"] == 2 * pages["auto"] > 0
    assert 4 * page_bytes["fp8"] == page_bytes["float32"] and pages["fp8"] == 4 * pages["float32"]
    for name, stored in (("bfloat16", torch.bfloat16), ("fp8", torch.uint8)):  # fp8 moves as bytes
        for page, host in engines[name].runner._mover._pairs:
            assert page.dtype == host.dtype == stored


@pytest.mark.parametrize(("name", "attention"), [("bfloat16", "auto"), ("fp8", "torch")])
def test_swapped_pages_come_back(
    name: str, attention: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Requests that gave way to others go on as if nothing had been."""
    tiny = tiny_model("qwen3")
    engine = served(
        tiny.folder,
        kv_cache_dtype=name,
        attention=attention,
        preemption="swap",
        num_pages=18,
        max_model_len=48,
    )
    tokens = engine.run(*(request_of(key, prompt, OUTPUT) for key, prompt in PROMPTS.items()))
    assert engine.engine.stats().preemptions > 0
    for key, prompt in PROMPTS.items():
        assert tokens[key] == rounded_greedy(tiny.model, prompt, name)[0]


def test_fp8_pages_on_triton(
    two_layers: Any,
    served: Make,
    request_of: Make,
    few_programs: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks and leases as on a GPU: the tokens of transformers with a rounded cache."""
    pytest.importorskip("triton")
    for module in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)  # long leases, however slow the machine
    engine = served(
        two_layers.folder,
        kv_cache_dtype="fp8_e4m3",
        attention="triton",
        max_lease=3,
        max_decoding_batch=2,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    assert engine.runner._loaded.gpu_model is not None and engine.runner._graphs is not None
    engine.runner._model.forward = engine._forward
    engine.runner._forward.run = engine._advance
    tokens = engine.run(*(request_of(key, PROMPTS[key], 4) for key in (0, 2)))
    for key in (0, 2):
        assert tokens[key] == rounded_greedy(two_layers.model, PROMPTS[key], "fp8", 4)[0]


def test_pages_that_the_attention_does_not_read(tiny_model: Make, engine_args: Make) -> None:
    folder = tiny_model("llama").folder
    ModelRunner(engine_args(folder, kv_cache_dtype="float16", attention="torch"))
    if try_load() is None:
        pytest.skip("the CPU kernels are not built")
    for name in ("float16", "fp8", "fp8_e4m3"):
        with pytest.raises(InvalidConfig, match=f"'{name}'.*float32 or bfloat16") as caught:
            ModelRunner(engine_args(folder, kv_cache_dtype=name))
        assert caught.value.param == "kv_cache_dtype"

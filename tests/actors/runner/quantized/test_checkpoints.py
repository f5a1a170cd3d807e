"""Checkpoints of every format give the logits and tokens of the weights that they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantised import KINDS, QuantisedModel, mxfp4_model
from rayfin.actors.runner.models.weights import load_config, load_model
from rayfin.actors.runner.quantized.linear import QuantLinear

Make = Callable[..., Any]
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 16, 9))]
CASES = [
    *((kind, "llama") for kind in KINDS),
    *((kind, family) for kind in ("gptq", "w4a16") for family in ("qwen3", "qwen2", "gpt_neox")),
]
EXPERTS = [
    (kind, family)
    for kind in ("gptq", "gptq desc_act", "awq", "w4a16", "fp8 blocks", "nf4", "w8a8")
    for family in ("mixtral", "qwen3_moe")
]


def write(kind: str, family: str, folder: Path) -> QuantisedModel:
    return mxfp4_model(folder) if kind == "mxfp4" else QuantisedModel(kind, family, folder)


@pytest.mark.parametrize("kind, family", [*CASES, *EXPERTS, ("mxfp4", "gpt_oss")])
def test_logits(kind: str, family: str, tmp_path: Path, engine_args: Make) -> None:
    written = write(kind, family, tmp_path)
    args = engine_args(written.folder, quantization="dequantize")
    attention = "eager" if family == "gpt_oss" else "sdpa"
    model = load_model(args, load_config(args), torch.device("cpu"), attention)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    tokens = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        torch.testing.assert_close(
            model(tokens).logits, written.model(tokens).logits, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    "kind, family",
    [("gptq desc_act", "llama"), ("awq", "qwen3"), ("w4a16", "mixtral"), ("mxfp4", "gpt_oss")],
)
@pytest.mark.parametrize("changes", [{"quantization": "dequantize"}, {}])
def test_tokens(
    kind: str,
    family: str,
    changes: dict[str, Any],
    tmp_path: Path,
    served: Make,
    request_of: Make,
) -> None:
    """Batched and in chunks, nothing set: what transformers generates with those weights."""
    written = write(kind, family, tmp_path)
    engine = served(written.folder, max_batch_tokens=9, **changes)
    requests = [request_of(key, prompt, 10) for key, prompt in enumerate(PROMPTS)]
    expected = {key: written.greedy(prompt, 10) for key, prompt in enumerate(PROMPTS)}
    assert engine.run(*requests, stagger=2) == expected


def test_dummy_weights_are_plain(tmp_path: Path, engine_args: Make) -> None:
    written = write("gptq", "llama", tmp_path)
    args = engine_args(written.folder, load_format="dummy")
    model = load_model(args, load_config(args), torch.device("cpu"), "sdpa")
    assert not any(isinstance(module, QuantLinear) for module in model.modules())

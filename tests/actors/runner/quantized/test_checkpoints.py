"""Checkpoints of every format give the logits and tokens of the weights that they stand for."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantised import KINDS, QuantisedModel, mxfp4_model
from rayfin.actors.runner.cpu import build_decoder
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.quantized.linear import QuantLinear
from rayfin.actors.runner.quantized.loader import quant_linears
from rayfin.actors.runner.quantized.packed import CodedLinear, merged, pack_quantized
from rayfin.kernels.cpu.kernels import try_kernels

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


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], QuantisedModel]:
    """format, family -> its checkpoint, written once; no test changes it."""

    @functools.cache
    def make(kind: str, family: str) -> QuantisedModel:
        folder = tmp_path_factory.mktemp("checkpoint")
        return mxfp4_model(folder) if kind == "mxfp4" else QuantisedModel(kind, family, folder)

    return make


@pytest.mark.parametrize("kind, family", [*CASES, *EXPERTS, ("mxfp4", "gpt_oss")])
def test_logits(kind: str, family: str, write: Make, engine_args: Make) -> None:
    written = write(kind, family)
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
    write: Make,
    served: Make,
    request_of: Make,
) -> None:
    """Batched and in chunks, nothing set: what transformers generates with those weights."""
    written = write(kind, family)
    engine = served(written.folder, max_batch_tokens=9, **changes)
    requests = [request_of(key, prompt, 10) for key, prompt in enumerate(PROMPTS)]
    expected = {key: written.greedy(prompt, 10) for key, prompt in enumerate(PROMPTS)}
    assert engine.run(*requests, stagger=2) == expected


CODED = [kind for kind in KINDS if kind not in ("gptq v2", "gptq sym", "fbgemm_fp8", "modelopt")]


@pytest.mark.parametrize(
    "kind, family",
    [
        *((kind, "llama") for kind in CODED),
        ("gptq", "gpt_neox"),
        ("awq", "qwen2"),
        ("fp8", "qwen3"),
    ],
)
def test_layers_that_stay_small(
    kind: str, family: str, write: Make, served: Make, request_of: Make
) -> None:
    """On the compiled kernels: the logits of the weights, within 1e-4, and their tokens."""
    written = write(kind, family)
    engine = served(written.folder, max_batch_tokens=9)
    tokens = engine.run(*(request_of(key, PROMPTS[key], 6) for key in range(3)), stagger=2)
    for key, prompt in enumerate(PROMPTS[:3]):
        assert tokens[key] == written.greedy(prompt, 6)
        with torch.inference_mode():
            logits = written.model(torch.tensor([prompt + tokens[key]])).logits[0]
        for position, sampled in engine.sampled[key].items():
            torch.testing.assert_close(sampled, logits[position - 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", CODED)
def test_no_weight_becomes_plain(kind: str, write: Make, engine_args: Make) -> None:
    if (kernels := try_kernels(1)) is None:
        pytest.skip("the CPU kernels are not built")
    args = engine_args(write(kind, "llama").folder)
    cpu = torch.device("cpu")
    model = load_model(args, load_config(args), cpu, "sdpa", keep_quantized=True)
    kept = sum(layer.bytes for _, _, layer in quant_linears(model))
    assert kept and 0 < pack_quantized(model, kernels) <= 1.5 * kept
    layers = [module for module in model.modules() if isinstance(module, CodedLinear)]
    assert len(layers) == 14 and not quant_linears(model)


@pytest.mark.parametrize("paired", [False, True])
def test_merged_layers_still_work(paired: bool, write: Make, engine_args: Make) -> None:
    """A decoder that is not replaced after all has its layers as before."""
    if (kernels := try_kernels(1)) is None:
        pytest.skip("the CPU kernels are not built")
    args = engine_args(write("awq", "llama").folder)
    model = load_model(args, load_config(args), torch.device("cpu"), "sdpa", keep_quantized=True)
    pack_quantized(model, kernels)
    mlp = model.model.layers[1].mlp
    layers, x = [mlp.gate_proj, mlp.up_proj], torch.randn(3, 64)
    expected = [layer(x) for layer in layers]
    whole = merged(layers, paired=paired)
    assert whole is not None and whole.outputs == 2 * layers[0].out_features
    assert all(layer._own is None for layer in layers)
    for layer, before in zip(layers, expected, strict=True):
        assert torch.equal(layer(x), before)


def test_rounded_rows_are_compared_less_closely(
    write: Make, served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep model whose rows are rounded differs in more than the last bits, and stays fused."""
    monkeypatch.setitem(build_decoder.TOLERANCE, torch.float32, 1e-9)
    written = write("gptq", "llama")
    assert not isinstance(served(written.folder).runner._model, CpuDecoder)
    assert isinstance(served(written.folder, activations="int8").runner._model, CpuDecoder)


@pytest.mark.parametrize("kind", ["gptq", "w4a16 asym", "w8a16"])
def test_rows_rounded_to_8_bits(kind: str, write: Make, served: Make, request_of: Make) -> None:
    """Close to the exact logits, and the same tokens in any batch and chunks."""
    written = write(kind, "llama")
    requests = [request_of(key, prompt, 8) for key, prompt in enumerate(PROMPTS)]
    rounded = served(written.folder, activations="int8")
    tokens = rounded.run(*requests)
    again = served(written.folder, activations="int8", max_batch_tokens=9)
    assert again.run(*requests, stagger=2) == tokens
    exact = served(written.folder)
    exact.run(request_of(0, PROMPTS[0], 1))
    (position, expected), *_ = exact.sampled[0].items()
    difference = (rounded.sampled[0][position] - expected).norm() / expected.norm()
    assert 0 < float(difference) < 0.1


def test_dummy_weights_are_plain(write: Make, engine_args: Make) -> None:
    written = write("gptq", "llama")
    args = engine_args(written.folder, load_format="dummy")
    model = load_model(args, load_config(args), torch.device("cpu"), "sdpa")
    assert not any(isinstance(module, QuantLinear) for module in model.modules())

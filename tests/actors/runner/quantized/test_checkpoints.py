"""Checkpoints of every format give the logits and tokens of the weights that they stand for."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
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
NVFP4 = ("nvfp4", "modelopt nvfp4")
EXPERTS = [
    (kind, family)
    for kind in ("gptq", "gptq desc_act", "awq", "w4a16", "fp8 blocks", "nf4", "w8a8", *NVFP4)
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


@pytest.mark.parametrize("kind", NVFP4)
def test_scales_of_nvfp4_take_a_bit(kind: str, write: Make, engine_args: Make) -> None:
    """Of each weight, in place of two: they are 16-bit floats, and projections are merged."""
    if (kernels := try_kernels(1)) is None:
        pytest.skip("the CPU kernels are not built")
    args = engine_args(write(kind, "llama").folder)
    model = load_model(args, load_config(args), torch.device("cpu"), "sdpa", keep_quantized=True)
    weights = sum(one.in_features * one.out_features for _, _, one in quant_linears(model))
    assert pack_quantized(model, kernels) * 8 == 5 * weights
    mlp = model.model.layers[0].mlp
    assert merged([mlp.gate_proj, mlp.up_proj], paired=True) is not None


@pytest.mark.parametrize("changes", [{}, {"quantization": "dequantize"}])
def test_modelopt_in_a_file_of_its_own(
    changes: dict[str, Any], tmp_path: Path, served: Make, request_of: Make
) -> None:
    """Layers of fp8 among those of NVFP4, each with another scale of all, and scales of pages."""
    written = QuantisedModel("modelopt nvfp4", "llama", tmp_path)
    found, layer = written.tensors, "model.layers.1.self_attn."
    for name in ("q_proj", "down_proj"):
        path = f"model.layers.0.{'mlp' if name == 'down_proj' else 'self_attn'}.{name}"
        weight = written.model.get_parameter(f"{path}.weight")
        fp8, dense = KINDS["modelopt"].write(*weight.shape, torch.Generator().manual_seed(4))
        del found[f"{path}.weight_scale_2"]
        found |= {f"{path}.{leaf}": tensor for leaf, tensor in fp8.items()}
        weight.data.copy_(dense)
    found[f"{layer}k_proj.weight_scale_2"] *= 2
    written.model.get_parameter(f"{layer}k_proj.weight").data *= 2
    found |= {f"{layer}k_proj.k_scale": torch.ones(1), f"{layer}v_proj.v_scale": torch.ones(1)}
    written.save(found)
    algorithms = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    both = {"quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}
    config = json.loads((written.folder / "config.json").read_text())
    del config["quantization_config"]
    (written.folder / "config.json").write_text(json.dumps(config))
    file = {
        "producer": {"name": "modelopt"},
        "quantization": {**both, "kv_cache_quant_algo": "FP8"},
    }
    (written.folder / "hf_quant_config.json").write_text(json.dumps(file))
    engine = served(written.folder, **changes)
    requests = [request_of(key, prompt, 8) for key, prompt in enumerate(PROMPTS)]
    expected = {key: written.greedy(prompt, 8) for key, prompt in enumerate(PROMPTS)}
    assert engine.run(*requests) == expected


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

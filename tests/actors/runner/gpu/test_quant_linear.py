"""Layers of quantised checkpoints on a GPU's kernels; without a GPU in the interpreter."""

import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantised import KINDS, QuantisedModel
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.checkpoint import _require_rounding
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.replace import probe_logits
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.quantized.loader import quant_linears
from rayfin.actors.runner.quantized.packed import rounds_rows
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.grouped import Grouped, round_weight
from tiers import few

pytest.importorskip("triton")
from rayfin.actors.runner.gpu import quant_linear
from rayfin.actors.runner.gpu.decoder import build_gpu_decoder
from rayfin.actors.runner.gpu.quant_linear import (
    CHECKED_ROWS,
    TritonLinear,
    fault_of,
    merged,
    pack_quantized,
    round_linears,
)
from rayfin.actors.runner.gpu.weights import GatedMlp
from rayfin.kernels.attention.triton_backend import TritonAttention
from rayfin.kernels.triton import quantized
from rayfin.kernels.triton.quantized import (
    DEPTH,
    CodedWeight,
    _cores,
    pack_weight,
    parts_of,
    product,
    shape_for,
)

Make = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def load(engine_args: Make, tmp_path: Path) -> Callable[[str, str], tuple[Any, Any]]:
    """format, family -> (the checkpoint with its layers as they are, the plain model)."""

    def make(kind: str, family: str) -> tuple[Any, Any]:
        written = QuantisedModel(kind, family, tmp_path)
        args = engine_args(written.folder)
        model = load_model(args, load_config(args), DEVICE, ATTENTION, keep_quantized=True)
        return model, written.model.to(DEVICE)

    return make


def layers_of(model: nn.Module) -> list[TritonLinear]:
    return [module for module in model.modules() if isinstance(module, TritonLinear)]


def plain_logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation(ATTENTION)
    paged = PagedModel(model, paged_attention)
    return probe_logits(paged, paged)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_format(kind: str, load: Make) -> None:
    """On transformers' modules, each layer with its codes."""
    model, plain = load(kind, "llama")
    assert quant_linears(model) and pack_quantized(model) > 0
    assert len(layers_of(model)) == 14 and not quant_linears(model)
    paged = PagedModel(model, paged_attention)
    wanted = plain_logits(plain)
    torch.testing.assert_close(probe_logits(paged, paged), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "family"),
    [("gptq desc_act", "llama"), ("awq", "qwen3"), ("w8a16", "qwen2"), ("fp8 blocks", "qwen3")],
)
def test_logits_of_the_decoder(kind: str, family: str, load: Make) -> None:
    """Projections are merged; the modules keep their part of them, and say what they said."""
    model, plain = load(kind, family)
    pack_quantized(model)
    paged, wanted = PagedModel(model, paged_attention), plain_logits(plain)
    decoder = build_gpu_decoder(paged, TritonAttention(DEVICE))
    assert decoder is not None
    for layer in decoder._layers:
        assert layer.is_coded and layer.qkv.gain is None and layer.qkv.norm is not None
    for logits in (probe_logits(decoder, paged), probe_logits(paged, paged)):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    attention = model.model.layers[0].self_attn
    whole = decoder._layers[0].qkv.weight
    assert attention.q_proj.codes.words.data_ptr() == whole.words.data_ptr()


def test_projections_of_several_formats_are_plain_in_the_decoder(load: Make) -> None:
    """One plain among codes, and codes of two kinds; the rest of the model keeps its codes."""
    model, _ = load("gptq desc_act", "llama")
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[0].mlp
    attention.q_proj = attention.q_proj.dequantized()
    plain_up = mlp.up_proj.dequantized()
    pack_quantized(model)
    codes = pack_weight(round_weight(plain_up.weight, 8))
    assert codes is not None
    mlp.up_proj = TritonLinear(codes, None, plain_up.weight.dtype)
    paged = PagedModel(model, paged_attention)
    wanted = probe_logits(paged, paged)
    decoder = build_gpu_decoder(paged, TritonAttention(DEVICE))
    assert decoder is not None
    torch.testing.assert_close(probe_logits(decoder, paged), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(probe_logits(paged, paged), wanted, rtol=1e-4, atol=1e-4)
    assert len(layers_of(model)) == 14 - 3 - 2
    first, second = decoder._layers
    assert isinstance(first.mlp, GatedMlp) and isinstance(first.mlp.gate_up.weight, torch.Tensor)
    assert isinstance(first.mlp.down, CodedWeight) and isinstance(first.qkv.weight, CodedWeight)
    assert isinstance(second.qkv.weight, torch.Tensor)


@pytest.mark.parametrize("kind", few(["gptq desc_act", "fp8 blocks", "nf4 nested"], 1))
def test_codes_become_plain_exactly(kind: str, load: Make) -> None:
    model, plain = load(kind, "qwen2")
    pack_quantized(model)
    query, wanted = (one.model.layers[0].self_attn.q_proj for one in (model, plain))
    assert torch.equal(query.dequantized().weight, wanted.weight)
    assert query.dequantized().bias is query.bias is not None


def test_codes_without_a_kernel_become_plain(
    load: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = load("gptq", "llama")
    monkeypatch.setattr("rayfin.actors.runner.gpu.quant_linear.pack_weight", lambda *weight: None)
    assert pack_quantized(model) == 0 and not layers_of(model) and not quant_linears(model)
    assert "14 layers of codes that no kernel reads are plain" in caplog.text
    paged = PagedModel(model, paged_attention)
    torch.testing.assert_close(probe_logits(paged, paged), plain_logits(plain))


class OutOfResources(Exception):
    pass


@pytest.mark.parametrize("fault", ["raises", "differs"])
@pytest.mark.parametrize("rows", CHECKED_ROWS)
def test_a_kernel_that_fails_leaves_layers_plain(
    fault: str, rows: int, load: Make, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A kernel that has no room on the device, or is wrong there, for one tile and one kind."""
    model, plain = load("gptq", "llama")

    def faulty(x: torch.Tensor, codes: Any, bias: Any) -> torch.Tensor:
        if len(x) == rows and codes.outputs == 96:
            if fault == "raises":
                raise OutOfResources("shared memory, required: 132096")
            return product(x, codes, bias).roll(1, dims=1)
        return product(x, codes, bias)

    monkeypatch.setattr(quant_linear, "product", faulty)
    assert pack_quantized(model) > 0 and len(layers_of(model)) == 10
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    assert "4 layers of few bits are plain, as with --quantization dequantize" in caplog.text
    assert ("OutOfResources: shared" if fault == "raises" else f"{rows} rows") in caplog.text
    assert "no kernel reads" not in caplog.text
    paged = PagedModel(model, paged_attention)
    wanted = plain_logits(plain)
    torch.testing.assert_close(probe_logits(paged, paged), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fault", [False, True])
def test_rows_rounded_to_fp8(
    fault: bool, engine_args: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """In steps of many rows, of weights of fp8 in 16 bits; exact where the product fails."""
    written = QuantisedModel("fp8", "llama", tmp_path)
    args = engine_args(written.folder, dtype="float16", activations="fp8")
    model = load_model(args, load_config(args), DEVICE, ATTENTION, keep_quantized=True)
    for _, _, one in quant_linears(model):
        one.dtype = torch.float16  # a load on a CPU widens it
    if fault:
        monkeypatch.setattr(quantized, "scaled_product", lambda x, weight: 1 / 0)
    with caplog.at_level("INFO"):
        assert pack_quantized(model, round_rows=True) > 0
    layers, up = layers_of(model), model.model.layers[0].mlp.up_proj
    assert len(layers) == 14 and not quant_linears(model)
    assert all(layer.rounds_rows != fault for layer in layers) and rounds_rows(model) != fault
    x = torch.randn(quantized.SCALED_ROWS, 64, device=DEVICE).half()
    wanted = nn.functional.linear(x, up.dequantized().weight).float()
    error = (up(x).float() - wanted).norm() / wanted.norm()
    assert error < 2e-3 if fault else 0.01 < error < 0.05
    few_rows = (up(x[1:]).float() - wanted[1:]).norm() / wanted.norm()
    assert few_rows < 2e-3
    if fault:
        assert "those of 14 are exact (ZeroDivisionError" in caplog.text
        with pytest.raises(InvalidConfig, match="has no such layer") as caught:
            _require_rounding(args, model)
        assert caught.value.param == "activations"
    else:
        assert "rows of 14 layers are rounded to fp8" in caplog.text
        _require_rounding(args, model)


@pytest.mark.parametrize("kind", few(["nf4 nested", "awq"], 1))
def test_the_last_outputs_are_compared(
    kind: str, load: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no plain weight of a whole head is made beside its codes."""
    model, _ = load(kind, "llama")
    seen: list[int] = []

    def watched(codes: Any, weight: torch.Tensor) -> str:
        seen.append(len(weight))
        assert fault_of(codes, weight.flip(0)), "the kernel agrees with another weight"
        return fault_of(codes, weight)

    monkeypatch.setattr(quant_linear, "CHECKED_OUTPUTS", 40)
    monkeypatch.setattr(quant_linear, "fault_of", watched)
    pack_quantized(model)
    assert len(layers_of(model)) == 14 and set(seen) == {32, 40}


def test_layers_that_are_rounded_are_compared_too(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model = deepcopy(tiny_model("llama").model).to(DEVICE)
    with monkeypatch.context() as faulty:
        faulty.setattr(quant_linear, "product", lambda x, codes, bias: x.sum() + x)
        assert round_linears(model, 8) and not layers_of(model)
    assert "layers of few bits are plain" in caplog.text
    assert round_linears(model, 8) == len(layers_of(model))


def test_a_plain_weight_is_gone_before_the_next_is_rounded(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device holds all plain weights beside the codes."""
    model = deepcopy(tiny_model("llama").model)
    seen: list[weakref.ref[torch.Tensor]] = []

    def watched(weight: torch.Tensor, bits: int) -> Any:
        assert not [one for one in seen if one() is not None]
        seen.append(weakref.ref(weight))
        return round_weight(weight, bits)

    monkeypatch.setattr(quant_linear, "round_weight", watched)
    monkeypatch.setattr(quant_linear, "fault_of", lambda codes, weight: "")
    assert round_linears(model, 4) == len(seen) == len(layers_of(model)) > 7


def test_a_layer_whose_weight_the_model_reads_is_plain(load: Make) -> None:
    """As the projection of Mamba's time steps, which its modules multiply by themselves."""
    model, plain = load("gptq", "llama")
    for one in (model, plain):
        mixer = one.model.layers[0].mlp
        mixer.dt_proj = mixer.up_proj
        del mixer.up_proj
    pack_quantized(model)
    assert type(model.model.layers[0].mlp.dt_proj) is nn.Linear and len(layers_of(model)) == 13
    expected = plain.model.layers[0].mlp.dt_proj.weight
    assert torch.equal(model.model.layers[0].mlp.dt_proj.weight, expected)
    count = sum(type(layer) is nn.Linear for layer in plain.modules())
    assert round_linears(plain, 8) == count - 2  # the head too
    assert type(plain.model.layers[0].mlp.dt_proj) is nn.Linear


def test_merged_layers_share_their_memory(load: Make) -> None:
    model, _ = load("w4a16 asym", "llama")
    pack_quantized(model)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 64, device=DEVICE)
    layers = [mlp.gate_proj, mlp.up_proj]
    before = [layer(x) for layer in layers]
    whole = merged(layers)
    assert whole is not None and whole.outputs == 192
    for layer, own in zip(layers, before, strict=True):
        torch.testing.assert_close(layer(x), own)
        assert layer.codes.words.untyped_storage().data_ptr() == (
            whole.words.untyped_storage().data_ptr()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "int8", "e4m3"])
def test_a_graph_records_a_layer(kind: str) -> None:
    """Nothing of it waits for the device, and counters are zeros again after each replay.

    Programs share the inputs of its outputs, so that they count.
    """
    random = torch.Generator().manual_seed(0)
    plain = torch.randn(192, 2048, generator=random).to(DEVICE).half() / 45
    weight = round_weight(plain, 4 if kind == "int4" else 8)
    if kind == "e4m3":
        scale = torch.full((192, 16), 2.0**-8, device=DEVICE)
        weight = Grouped((plain * 256).to(torch.float8_e4m3fn), scale, 128, 8)
    codes = pack_weight(weight, torch.float16)
    assert codes is not None and codes.parted
    shape = shape_for(2, codes, torch.float16)
    tiles, blocks = -(-192 // shape.columns), 2048 // DEPTH
    assert parts_of(tiles, blocks, _cores(DEVICE) * shape.programs) > 1
    layer, x = TritonLinear(codes, None, plain.dtype), torch.randn(2, 2048, device=DEVICE).half()
    wanted = layer(x)
    expected = nn.functional.linear(x, weight.dense().half())
    torch.testing.assert_close(wanted, expected, rtol=5e-3, atol=5e-3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = layer(x)
    for _ in range(3):
        given.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(given, wanted) and not layer.codes.arrived.any()


def test_indexers_are_not_rounded(tiny_model: Make) -> None:
    """They choose the keys that a token sees (DeepSeek-V3.2)."""
    model = deepcopy(tiny_model("deepseek_v32").model)
    assert round_linears(model, 8) > 0
    indexers = [own.indexer for own in model.modules() if hasattr(own, "indexer")]
    kinds = {type(part) for own in indexers for part in own.modules()}
    assert indexers and TritonLinear not in kinds

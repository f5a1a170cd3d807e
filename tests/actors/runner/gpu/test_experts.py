"""Mixtures whose experts stay codes on a GPU's kernels; without a GPU in the interpreter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantised
from quantised import GROUP, KINDS, Kind, QuantisedModel, fp8, mxfp4_model
from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.models import weights
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.dtypes import DTYPES
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.replace import probe_logits
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.quantized.experts import QuantExperts, quant_experts
from rayfin.actors.runner.quantized.loader import dequantize
from rayfin.actors.scheduler.policy import multi_step
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.sampling import select as sampling_select
from tiers import few

pytest.importorskip("triton")
from rayfin.actors.runner.gpu import experts as module
from rayfin.actors.runner.gpu.decoder import GpuDecoder, build_gpu_decoder
from rayfin.actors.runner.gpu.experts import GroupedExperts, pack_experts
from rayfin.actors.runner.gpu.quant_linear import pack_quantized
from rayfin.kernels.attention.triton_backend import TritonAttention
from rayfin.kernels.triton.quantized import E2M1, E4M3, INTEGER, CodedWeight

Make = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = Kind(
    fp8("weight_scale_inv", block=2 * GROUP),
    {"quant_method": "fp8", "weight_block_size": [2 * GROUP, 2 * GROUP]},
)
"""Blocks of 32 are none that stay codes, and those of checkpoints have 128."""


@pytest.fixture(autouse=True)
def settings_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "fp8 blocks", FP8)
    monkeypatch.setattr(weights, "resolve_dtype", lambda args, *_: DTYPES[args.dtype])


def write(kind: str, family: str, folder: Path, **changes: Any) -> QuantisedModel:
    if kind == "mxfp4":
        return mxfp4_model(folder)
    return QuantisedModel(kind, family, folder, **changes)


def kept(written: QuantisedModel, engine_args: Make, dtype: str = "float16") -> Any:
    """transformers' model, its layers and experts as they are in the checkpoint."""
    args = engine_args(written.folder, dtype=dtype)
    return load_model(args, load_config(args), DEVICE, ATTENTION, keep_quantized=True)


def mixtures(model: nn.Module) -> list[GroupedExperts]:
    return [one for one in model.modules() if isinstance(one, GroupedExperts)]


def plain_logits(written: QuantisedModel) -> torch.Tensor:
    written.model.to(DEVICE).set_attn_implementation(ATTENTION)
    paged = PagedModel(written.model, paged_attention)
    return probe_logits(paged, paged)


def close(given: torch.Tensor, wanted: torch.Tensor) -> None:
    """Rows are of 16 bits."""
    assert (given.float() - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize(
    ("kind", "family", "codes"),
    [
        ("fp8 blocks", "qwen3_moe", E4M3),
        ("gptq", "qwen3_moe", INTEGER),
        ("mxfp4", "gpt_oss", E2M1),
        *few(
            [
                ("w4a16 asym", "mixtral", INTEGER),
                ("w8a16", "mixtral", INTEGER),
                ("fp8", "olmoe", E4M3),
                ("mxfp4 packed", "qwen3_moe", E2M1),
                ("gptq 8 bits", "qwen3_moe", INTEGER),
                ("modelopt nvfp4", "mixtral", E2M1),
                ("nvfp4", "qwen3_moe", E2M1),
            ],
            2,
        ),
    ],
)
def test_experts_of_codes(
    kind: str, family: str, codes: int, tmp_path: Path, engine_args: Make
) -> None:
    """What transformers' own experts give with the weights that the codes stand for."""
    written = write(kind, family, tmp_path)
    model, plain = kept(written, engine_args), written.model.to(DEVICE)
    size = pack_experts(model)
    packed = {path: one for path, one in model.named_modules() if isinstance(one, GroupedExperts)}
    assert len(packed) == 2 and not quant_experts(model)
    assert size == sum(one.coded_bytes for one in packed.values())
    x, shares = torch.randn(5, 64, device=DEVICE), torch.rand(5, 2, device=DEVICE)
    chosen = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1]], device=DEVICE)
    for path, one in packed.items():
        for weight in (one.experts.gate_up, one.experts.down):
            assert isinstance(weight, CodedWeight) and weight.kind == codes
            assert weight.words.device.type == DEVICE.type
        close(one(x.half(), chosen, shares.half()), plain.get_submodule(path)(x, chosen, shares))


@pytest.mark.slow(reason="interprets a decoder's steps")
def test_logits_of_the_decoder(tmp_path: Path, engine_args: Make) -> None:
    written = write("fp8 blocks", "qwen3_moe", tmp_path)
    model, wanted = kept(written, engine_args), plain_logits(written)
    pack_quantized(model)
    assert pack_experts(model) > 0
    paged = PagedModel(model, paged_attention)
    decoder = build_gpu_decoder(paged, TritonAttention(DEVICE))
    assert decoder is not None
    close(probe_logits(decoder, paged), wanted)


def test_plain_experts_are_never_there(
    tmp_path: Path, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when the model is loaded nor while experts are packed; but two for comparison."""
    written = write("gptq", "mixtral", tmp_path)
    seen: list[int] = []
    merged = QuantExperts._merged

    def watched(self: QuantExperts, numbers: Any, *kind: Any) -> Any:
        seen.append(len(list(numbers)))
        return merged(self, numbers, *kind)

    monkeypatch.setattr(QuantExperts, "_merged", watched)
    model = kept(written, engine_args)
    assert not [name for name, _ in model.named_parameters() if "gate_up_proj" in name]
    assert pack_experts(model) > 0 and seen and set(seen) == {2}
    assert not [name for name, _ in model.named_parameters() if "gate_up_proj" in name]


@pytest.mark.parametrize(
    ("why", "kind", "settings"),
    [
        ("no kernel reads their codes", "nf4", {}),
        ("no kernel reads their codes", "gptq desc_act", {}),
        ("no kernel reads their codes", "gptq", {"dtype": "float32"}),
        ("no kernel has their activation", "gptq", {"hidden_act": "relu"}),
    ],
)
def test_what_becomes_plain(
    why: str, kind: str, settings: dict[str, Any], tmp_path: Path, engine_args: Make, caplog: Any
) -> None:
    settings, dtype = dict(settings), settings.get("dtype", "float16")
    settings.pop("dtype", None)
    written = write(kind, "mixtral", tmp_path, **settings)
    model, wanted = kept(written, engine_args, dtype), plain_logits(written)
    assert pack_experts(model) == 0 and not mixtures(model) and not quant_experts(model)
    assert f"the experts of 2 layers are plain: {why}" in caplog.text
    dequantize(model)
    paged = PagedModel(model, paged_attention)
    close(probe_logits(paged, paged), wanted)


@pytest.mark.parametrize("fault", ["raises", "differs"])
@pytest.mark.parametrize("rows", [4, 65])
def test_a_kernel_that_fails_leaves_experts_plain(
    fault: str,
    rows: int,
    tmp_path: Path,
    engine_args: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    """In tiles of few rows, or of many."""
    model = kept(write("gptq", "mixtral", tmp_path), engine_args)
    run = module.run_experts

    def faulty(x: torch.Tensor, *inputs: Any) -> torch.Tensor:
        if len(x) == rows and fault == "raises":
            raise RuntimeError("shared memory, required: 132096")
        return run(x, *inputs) * (1.05 if len(x) == rows else 1.0)

    monkeypatch.setattr(module, "run_experts", faulty)
    assert pack_experts(model) == 0 and not mixtures(model)
    assert ("shared memory" if fault == "raises" else f"{rows} rows differ") in caplog.text


@pytest.mark.slow(reason="interprets an engine's steps")
def test_the_tokens_of_an_engine(
    tmp_path: Path, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss: its decoder is recognised, so that its steps are graphs."""
    for place in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(place, "can_use_triton", lambda device: True)
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)
    written = quantised.mxfp4_model(tmp_path)
    settings = {"attention": "triton", "device": DEVICE.type, "dtype": "float16"}
    engine = served(written.folder, max_lease=3, max_decoding_batch=2, **settings)
    decoder = engine.runner._loaded.gpu_model
    assert isinstance(decoder, GpuDecoder) and len(mixtures(decoder._paged.transformer)) == 2
    prompt = [5, 9, 3, 100, 7]
    engine.runner._model.forward = engine._forward
    engine.runner._forward.run = engine._advance
    assert engine.run(request_of(0, prompt, 6))[0] == written.greedy(prompt, 6)

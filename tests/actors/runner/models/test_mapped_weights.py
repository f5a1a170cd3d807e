"""Weights that stay in 16 bits until they are packed: the same bits, and far less memory."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from rayfin.actors.runner.cpu.build_decoder import packing
from rayfin.actors.runner.cpu.packed_experts import PackedExpertsModule, packed_experts
from rayfin.actors.runner.models import mapped_weights, weights
from rayfin.actors.runner.models.mapped_weights import (
    NarrowWeight,
    hold_narrow,
    narrow_loads,
    widen,
)
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, try_kernels
from tiers import few

Make = Callable[..., Any]
ROOT = Path(__file__).parents[4]
PROMPT = [3 + 7 * i % 100 for i in range(30)]
MORE = 8
FAMILIES = (
    *("llama", "qwen3", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "mixtral", "olmoe"),
    *("deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next", "lfm2", "mamba2", "bloom", "falcon"),
)


@pytest.fixture
def checkpoint(tiny_model: Make, tmp_path: Path) -> Make:
    def make(family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        """The tiny model, stored in 16 bits."""
        folder = tiny_model(family).folder
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path)
        return tmp_path

    return make


def load(folder: Path, *, wanted: bool) -> Any:
    """A float32 model, and the names of its narrow weights."""
    with narrow_loads(wanted) as names:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hold_narrow(model.eval().requires_grad_(False), names)
    return model, names


def answers(served: Make, request_of: Make, folder: Path, **settings: Any) -> list[torch.Tensor]:
    """The logits that its tokens are drawn from."""
    engine = served(folder, **settings)
    engine.run(request_of(0, PROMPT, MORE))
    return [engine.sampled[0][len(PROMPT) + i] for i in range(MORE)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_of_a_model_in_float32(
    family: str,
    checkpoint: Make,
    served: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint(family)
    held: list[set[str]] = []
    real = mapped_weights.hold_narrow

    def spy(model: nn.Module, names: set[str]) -> None:
        held.append(set(names))
        real(model, names)

    monkeypatch.setattr(weights, "hold_narrow", spy)
    found = answers(served, request_of, folder)
    assert held and held[0], "no weight was narrow"
    monkeypatch.setattr(weights, "narrow_loads", lambda wanted: narrow_loads(False))
    expected = answers(served, request_of, folder)
    assert not held[-1]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"enable_lora": True},
        {"enable_prompt_embeds": True},
        {"attention": "torch"},
    ],
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_same_bits_with_other_settings(
    family: str,
    settings: dict[str, Any],
    checkpoint: Make,
    served: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint(family)
    found = answers(served, request_of, folder, **settings)
    monkeypatch.setattr(weights, "narrow_loads", lambda wanted: narrow_loads(False))
    expected = answers(served, request_of, folder, **settings)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_cache_of_weights_holds_the_same_bits(
    checkpoint: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    expected = answers(served, request_of, folder)
    for _ in range(2):  # the second start reads no checkpoint
        found = answers(served, request_of, folder, weights_cache=str(tmp_path / "cache"))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "gpt2", "mamba2"])
def test_a_narrow_model_computes_in_float32(
    family: str, dtype: torch.dtype, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of a few outputs as well: sums are in another order then, and no more."""
    folder = checkpoint(family, dtype)
    plain, none = load(folder, wanted=False)
    model, names = load(folder, wanted=True)
    assert names and not none
    assert model.dtype == torch.float32
    assert all(not buffer.dtype.itemsize == 2 for buffer in model.buffers())
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = plain(tokens, use_cache=False).logits
        assert torch.equal(model(tokens, use_cache=False).logits, expected)
        monkeypatch.setattr(mapped_weights, "BLOCK", 100)
        torch.testing.assert_close(model(tokens, use_cache=False).logits, expected)
    widen(model)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert type(one) is nn.Parameter and not one.requires_grad, name
        assert one.dtype == torch.float32 and torch.equal(one, other), name


def test_tied_weights_stay_one(tiny_models: Any, tmp_path: Path) -> None:
    config = tiny_models.tiny_config("llama")
    config.tie_word_embeddings = True
    make: Any = AutoModelForCausalLM
    make.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model, _ = load(tmp_path, wanted=True)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert isinstance(head, NarrowWeight) and head is embedding
    assert head.data_ptr() != model.model.layers[0].mlp.up_proj.weight.data_ptr()
    widen(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is mapped")
def test_pages_of_the_file_come_back(checkpoint: Make, kernels: CpuKernels) -> None:
    plain, _ = load(checkpoint("llama"), wanted=False)
    model, names = load(checkpoint("llama"), wanted=True)
    held = [model.get_parameter(name) for name in sorted(names)]
    assert all(one._mapped for one in held)
    matrices = [mapped_weights.packed(kernels.pack, [one]) for one in held]
    assert len(matrices) == len(held)
    for name in names:
        assert torch.equal(model.get_parameter(name).wide(), plain.get_parameter(name)), name


def test_nothing_writes_it(checkpoint: Make) -> None:
    model, _ = load(checkpoint("llama"), wanted=True)
    weight = model.lm_head.weight
    for write in (weight.zero_, lambda: weight.__setitem__(0, 1.0), lambda: weight.add_(1.0)):
        with pytest.raises(RuntimeError, match="not written"):
            write()
    assert torch.equal(torch.zeros(weight.shape).copy_(weight), weight.wide())


def test_a_float32_matrix_beside_16_bits_stays_exact(checkpoint: Make) -> None:
    """The others stay narrow."""
    folder = checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    exact = model.requires_grad_(False).model.layers[0].mlp.up_proj.float().weight.add_(1e-4)
    model.save_pretrained(folder)
    loaded, names = load(folder, wanted=True)
    assert "model.layers.0.mlp.up_proj.weight" not in names
    assert "model.layers.1.mlp.up_proj.weight" in names
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, exact)


def test_a_float32_matrix_that_is_renamed_widens_all(checkpoint: Make) -> None:
    """It may become a part of any parameter, which 16 bits would round."""
    folder = checkpoint("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    expert = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[expert] = tensors[expert].float().add_(1e-4)
    save_file(tensors, path, {"format": "pt"})
    loaded, names = load(folder, wanted=True)
    assert not names
    inputs = tensors[expert].shape[0]
    merged = loaded.model.layers[0].mlp.experts.gate_up_proj[1, inputs:]
    assert torch.equal(merged, tensors[expert])


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = try_kernels(1)
    if found is None:
        pytest.skip("the CPU kernels are not built")
    return found


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_packed_weight_is_read_back(
    mapped: bool, dtype: torch.dtype, kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the matrix where it had memory of its own; out of the file where it was mapped."""
    monkeypatch.setattr(mapped_weights, "_advise", lambda *_: None)  # these are not in a file
    own = [torch.randn(outputs, 24).to(dtype) for outputs in (20, 12)]
    held = [NarrowWeight(one, mapped) for one in own]
    matrix = mapped_weights.packed(kernels.pack, held)
    assert all((one._stored is not None) == mapped for one in held)
    every = torch.arange(32)
    assert torch.equal(matrix.rows(every), torch.cat(own).float())
    for one, expected in zip(held, own, strict=True):
        assert torch.equal(one.wide(), expected.float())
        assert torch.equal(one[3], expected[3].float())


def test_a_rounded_weight_keeps_its_memory(kernels: CpuKernels) -> None:
    weight = NarrowWeight(torch.randn(16, 64).bfloat16(), mapped=False)
    expected = weight.wide()
    mapped_weights.packed(packing(kernels, "int8").layers, [weight])
    assert torch.equal(weight.wide(), expected)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("mapped", [True, False])
def test_packed_experts_give_up_their_memory(
    family: str,
    mapped: bool,
    checkpoint: Make,
    kernels: CpuKernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mapped file still has them where it is one."""
    if not mapped:
        monkeypatch.setattr(mapped_weights, "_unchanged_files", lambda: [])
    model, _ = load(checkpoint(family), wanted=True)
    experts = model.model.layers[0].mlp.experts
    expected = [experts.gate_up_proj.wide(), experts.down_proj.wide()]
    made = packed_experts(kernels, experts, Activation.SILU, kernels.pack)
    assert isinstance(made, PackedExpertsModule)
    for one, other in zip((experts.gate_up_proj, experts.down_proj), expected, strict=True):
        assert (one._stored is not None) == mapped
        assert torch.equal(one.wide(), other)


@pytest.fixture(scope="module")
def measure() -> Iterator[Callable[[list[str]], Any]]:
    """MiB of a load with the options given, in a process that has imported what it needs."""
    command = [sys.executable, str(ROOT / "benchmarks" / "load_memory.py"), "--lines"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        asked, printed = process.stdin, process.stdout
        assert asked is not None and printed is not None

        def ask(options: list[str]) -> Any:
            asked.write(json.dumps(options) + "\n")
            asked.flush()
            line = printed.readline()
            assert line, "the load has failed"
            return json.loads(line)

        yield ask
        asked.close()


RANKS = ["--ranks", "2", "--hidden", "1024"]

BAR = 1.2
"""Anonymous memory at the peak of a load, as a share of what stays."""


@pytest.mark.slow(reason="makes and loads models of 100 MB in processes of their own")
@pytest.mark.parametrize(
    "shape",
    few(
        [
            ["--layers", "8"],
            ["--layers", "6", "--stored", "float16"],
            ["--layers", "12", "--experts", "4"],
            ["--layers", "24", "--settings", '{"quantization": "int4"}'],
            ["--layers", "12", "--experts", "4", "--settings", '{"quantization": "int8"}'],
            ["--layers", "32", "--checkpoint", "gptq"],
            ["--layers", "16", "--checkpoint", "fp8"],
            # A rank's plain head is there twice for a time.
            ["--layers", "40", "--checkpoint", "gptq", *RANKS, "--vocabulary", "8000"],
            ["--layers", "12", "--checkpoint", "gptq", "--experts", "4"],
            ["--layers", "16", "--checkpoint", "mxfp4", "--experts", "8"],
            [
                "--layers",
                "8",
                "--checkpoint",
                "gptq",
                "--settings",
                '{"quantization": "dequantize"}',
            ],
            ["--layers", "12", "--encoder"],
            ["--layers", "8", "--images"],
            ["--layers", "16", "--settings", '{"quantization": "int8"}'],
        ],
        2,
    ),
)
def test_a_load_takes_little_more_than_what_stays(
    shape: list[str], measure: Callable[[list[str]], Any]
) -> None:
    if try_kernels(1) is None:
        pytest.skip("the CPU kernels are not built")
    measured = measure(["--hidden", "768", "--vocabulary", "16000", *shape])
    before, peak, after = (measured[when]["anonymous"] for when in ("before", "peak", "after"))
    assert after - before > 80, "MiB: the weights are there"
    assert (peak - before) / (after - before) < BAR, measured

"""Mixtures of experts whose weights stay codes: their tokens, memory, and where they do not."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantised import KINDS, QuantisedModel
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.cpu import coded_experts
from rayfin.actors.runner.cpu.coded_experts import CodedExperts, pack_quantized_experts
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.quantized.experts import QuantExperts, quant_experts
from rayfin.kernels.cpu.codes import CodedMatrix
from rayfin.kernels.cpu.kernels import CpuKernels, Matrix, try_kernels
from tiers import few

Make = Callable[..., Any]
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 16, 9))]
CODED = [kind for kind in KINDS if kind not in ("gptq v2", "gptq sym", "fbgemm_fp8", "modelopt")]
OTHERS = ["qwen2_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3", "qwen3_next"]
EXPERT = "model.layers.1.mlp.experts.2."


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = try_kernels(1)
    if found is None:
        pytest.skip("the CPU kernels are not built")
    return found


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], QuantisedModel]:
    """format, family -> its checkpoint, written once; no test changes it."""

    @functools.cache
    def make(kind: str, family: str) -> QuantisedModel:
        return QuantisedModel(kind, family, tmp_path_factory.mktemp("checkpoint"))

    return make


def kept(written: QuantisedModel, engine_args: Make, **changes: Any) -> Any:
    """transformers' model, its quantised layers and experts as they are in the checkpoint."""
    args = engine_args(written.folder, **changes)
    cpu = torch.device("cpu")
    return load_model(args, load_config(args), cpu, "sdpa", keep_quantized=True, narrow=True)


def mixtures(model: nn.Module) -> list[CodedExperts]:
    return [module for module in model.modules() if isinstance(module, CodedExperts)]


def merged(model: nn.Module) -> list[nn.Module]:
    """Experts whose weights are plain."""
    return [one for one in model.modules() if "gate_up_proj" in one._parameters]


@pytest.mark.parametrize(
    "kind, family",
    [
        *((kind, "qwen3_moe") for kind in CODED),
        *few([(kind, "mixtral") for kind in CODED], 2),
        *few([("gptq", family) for family in OTHERS], 3),
    ],
)
def test_tokens(
    kind: str,
    family: str,
    write: Make,
    served: Make,
    request_of: Make,
    kernels: CpuKernels,
) -> None:
    """Alone, and in batches and chunks: what transformers generates with the weights."""
    written = write(kind, family)
    expected = {key: written.greedy(prompt, 8) for key, prompt in enumerate(PROMPTS)}
    alone = served(written.folder)
    found = mixtures(alone.runner._model.transformer)
    assert found and not merged(alone.runner._model.transformer)
    assert all(isinstance(one, CodedMatrix) for mixture in found for one in mixture.matrices)
    assert alone.run(request_of(1, PROMPTS[1], 8)) == {1: expected[1]}
    requests = [request_of(key, prompt, 8) for key, prompt in enumerate(PROMPTS)]
    batched = served(written.folder, max_batch_tokens=9)
    assert batched.run(*requests, stagger=2) == expected


@pytest.mark.parametrize("kind", CODED)
def test_weights_are_as_small_as_in_the_checkpoint(
    kind: str, write: Make, engine_args: Make, kernels: CpuKernels
) -> None:
    written = write(kind, "mixtral")
    model = kept(written, engine_args)
    assert len(quant_experts(model)) == 2 and not merged(model)
    size = sum(one.nbytes for name, one in written.tensors.items() if ".experts." in name)
    assert 0 < pack_quantized_experts(model, kernels) <= 1.5 * size
    assert not quant_experts(model) and not merged(model)
    assert all(isinstance(own, CodedMatrix) for one in mixtures(model) for own in one.matrices)


@pytest.mark.parametrize("kind", ["gptq desc_act", "fp8 blocks"])
def test_the_reference_is_the_loop_of_transformers(
    kind: str, write: Make, engine_args: Make
) -> None:
    model = kept(write(kind, "qwen3_moe"), engine_args)
    for _, _, experts in quant_experts(model):
        x, weights = torch.randn(5, 64), torch.rand(5, 2)
        chosen = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1]])
        expected = experts.dequantized()(x, chosen, weights)
        torch.testing.assert_close(experts(x, chosen, weights), expected)


@pytest.mark.parametrize("changes", [{"attention": "torch"}, {"quantization": "dequantize"}])
def test_plain_where_no_kernel_runs(
    changes: dict[str, Any], write: Make, served: Make, request_of: Make
) -> None:
    written = write("awq", "qwen3_moe")
    engine = served(written.folder, **changes)
    assert not mixtures(engine.runner._model.transformer)
    assert engine.run(request_of(0, PROMPTS[0], 8)) == {0: written.greedy(PROMPTS[0], 8)}


def test_gate_and_up_in_other_orders(
    tmp_path: Path, served: Make, request_of: Make, kernels: CpuKernels
) -> None:
    """Such a pair is plain, and each other projection stays in 4 bits."""
    written = QuantisedModel("gptq desc_act", "mixtral", tmp_path)
    found = written.tensors
    name = "model.layers.1.block_sparse_moe.experts.2.w1."
    found[f"{name}g_idx"] = 1 - found[f"{name}g_idx"]  # of two groups
    for leaf in ("scales", "qzeros"):  # so that each input has the numbers that it had
        found[name + leaf] = found[name + leaf].flip(0)
    written.save(found)
    engine = served(written.folder)
    plain = [
        matrix
        for mixture in mixtures(engine.runner._model.transformer)
        for matrix in mixture.matrices
        if type(matrix) is Matrix
    ]
    assert len(plain) == 1 and plain[0].paired
    assert engine.run(request_of(0, PROMPTS[0], 8)) == {0: written.greedy(PROMPTS[0], 8)}


def test_a_layer_that_is_stored_exactly(
    tmp_path: Path, served: Make, request_of: Make, kernels: CpuKernels
) -> None:
    """Its experts are merged as ever, those of the other layer stay codes."""
    written = QuantisedModel("gptq", "qwen3_moe", tmp_path)
    experts = "model.layers.1.mlp.experts."
    found = {name: one for name, one in written.tensors.items() if not name.startswith(experts)}
    module = written.model.get_submodule(experts.removesuffix("."))
    for number in range(4):
        gate, up = module.gate_up_proj[number].chunk(2)
        found[f"{experts}{number}.gate_proj.weight"] = gate
        found[f"{experts}{number}.up_proj.weight"] = up
        found[f"{experts}{number}.down_proj.weight"] = module.down_proj[number]
    written.save({name: one.detach().contiguous() for name, one in found.items()})
    engine = served(written.folder)
    assert len(mixtures(engine.runner._model.transformer)) == 1
    assert engine.run(request_of(0, PROMPTS[0], 8)) == {0: written.greedy(PROMPTS[0], 8)}


def test_an_activation_that_no_kernel_has(
    tmp_path: Path, served: Make, request_of: Make, kernels: CpuKernels
) -> None:
    written = QuantisedModel("gptq", "mixtral", tmp_path, hidden_act="relu")
    engine = served(written.folder)
    model = engine.runner._model.transformer
    assert not mixtures(model) and len(merged(model)) == 2
    assert engine.run(request_of(0, PROMPTS[0], 8)) == {0: written.greedy(PROMPTS[0], 8)}


def test_a_long_load_says_how_far_it_is(
    write: Make,
    engine_args: Make,
    kernels: CpuKernels,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = kept(write("gptq", "qwen3_moe"), engine_args)
    monkeypatch.setattr(coded_experts, "LOAD_LOG_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        pack_quantized_experts(model, kernels)
    assert "packed the experts of 1 of 2 layers" in caplog.text


def test_experts_that_compute_in_another_way(
    write: Make,
    engine_args: Make,
    kernels: CpuKernels,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Compared at load: the kernels give other numbers than transformers' loop."""
    model = kept(write("gptq", "qwen3_moe"), engine_args)
    forward = QuantExperts.forward
    monkeypatch.setattr(QuantExperts, "forward", lambda *inputs: 1.01 * forward(*inputs))
    assert pack_quantized_experts(model, kernels) == 0
    assert not mixtures(model) and len(merged(model)) == 2
    assert "the experts of 2 layers are plain" in caplog.text


def test_rows_rounded_to_8_bits(
    write: Make, served: Make, request_of: Make, kernels: CpuKernels
) -> None:
    """Close to the exact logits, and the same tokens in any batch and chunks."""
    written = write("gptq", "qwen3_moe")
    requests = [request_of(key, prompt, 8) for key, prompt in enumerate(PROMPTS)]
    rounded = served(written.folder, activations="int8")
    found = mixtures(rounded.runner._model.transformer)
    assert found and all(one.rounds_rows for one in found)
    tokens = rounded.run(*requests)
    exact = served(written.folder)
    exact.run(request_of(0, PROMPTS[0], 1))
    (position, expected), *_ = exact.sampled[0].items()
    difference = (rounded.sampled[0][position] - expected).norm() / expected.norm()
    assert 0 < float(difference) < 0.2
    again = served(written.folder, activations="int8", max_batch_tokens=9)
    assert again.run(*requests, stagger=2) == tokens


def drop(leaf: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """Drops all tensors of a layer of an expert."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(EXPERT + leaf)]:
            del tensors[name]

    return change


def put(leaf: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT + leaf] = tensor

    return change


BROKEN: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], None], str]] = {
    "no such layer": ("gptq", drop("up_proj"), r"lacks .*experts\.2\.up_proj, which its experts"),
    "no such expert": ("awq", drop(""), r"lacks .*experts\.2\.\w+, which its experts need"),
    "a short tensor": (
        *("awq", put("down_proj.qweight", torch.zeros(32, 4).int())),
        r"experts\.2\.down_proj\.qweight has shape \[32, 4\]",
    ),
    "codes as floats": (
        *("gptq", put("gate_proj.qweight", torch.zeros(8, 32))),
        r"experts\.2\.gate_proj\.qweight holds float32, and gptq wants int32",
    ),
    "groups that do not exist": (
        *("gptq", put("up_proj.g_idx", torch.full((64,), 7).int())),
        r"experts\.2\.up_proj: g_idx does not put the 64 inputs into groups of 32",
    ),
    "another shape": (
        *("w4a16", put("down_proj.weight_shape", torch.tensor([64, 30]))),
        r"experts\.2\.down_proj: weight_shape says \[64, 30\]",
    ),
    "two formats": (
        *("gptq", put("up_proj.weight_packed", torch.zeros(8, 32).int())),
        r"experts\.2\.up_proj\.weight_packed is not of the format",
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_broken(case: str, tmp_path: Path, engine_args: Make, kernels: CpuKernels) -> None:
    kind, change, line = BROKEN[case]
    written = QuantisedModel(kind, "qwen3_moe", tmp_path)
    found = written.tensors
    change(found)
    written.save(found)
    with pytest.raises(InvalidConfig, match=line) as caught:
        load(engine_args(written.folder))
    assert caught.value.param == "quantization"
    assert "\n" not in str(caught.value)

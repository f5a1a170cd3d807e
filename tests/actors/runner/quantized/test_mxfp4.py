"""gpt-oss with experts in blocks of 4-bit floats, which stay so on the compiled kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantised import QuantisedModel, mxfp4_model
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.cpu.coded_experts import CodedExperts, pack_quantized_experts
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.quantized.experts import quant_experts
from rayfin.kernels.cpu.codes import CodedMatrix, Codes
from rayfin.kernels.cpu.kernels import CpuKernels, try_kernels

Make = Callable[..., Any]
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 16, 9))]
EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = try_kernels(1)
    if found is None:
        pytest.skip("the CPU kernels are not built")
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> QuantisedModel:
    return mxfp4_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(written: QuantisedModel) -> dict[int, list[int]]:
    """What transformers generates with the weights that the blocks stand for."""
    return {key: written.greedy(prompt, 10) for key, prompt in enumerate(PROMPTS)}


def kept(written: QuantisedModel, engine_args: Make) -> Any:
    """transformers' model, its experts as they are in the checkpoint."""
    args = engine_args(written.folder)
    cpu = torch.device("cpu")
    return load_model(args, load_config(args), cpu, "eager", keep_quantized=True, narrow=True)


def matrices(model: nn.Module) -> list[Any]:
    mixtures = [module for module in model.modules() if isinstance(module, CodedExperts)]
    return [matrix for mixture in mixtures for matrix in mixture.matrices]


def test_tokens(
    written: QuantisedModel,
    expected: dict[int, list[int]],
    served: Make,
    request_of: Make,
    kernels: CpuKernels,
) -> None:
    """Alone, and in batches and chunks: what transformers generates with the weights."""
    alone = served(written.folder)
    found = matrices(alone.runner._model.transformer)
    assert len(found) == 16 and all(one.codes == Codes.FP4 for one in found)
    assert alone.run(request_of(1, PROMPTS[1], 10)) == {1: expected[1]}
    requests = [request_of(key, prompt, 10) for key, prompt in enumerate(PROMPTS)]
    batched = served(written.folder, max_batch_tokens=9)
    assert batched.run(*requests, stagger=2) == expected


def test_the_bits_of_plain_weights(
    written: QuantisedModel, served: Make, request_of: Make, kernels: CpuKernels
) -> None:
    """But on matrix tiles, which sum in another order."""
    engines = [served(written.folder), served(written.folder, quantization="dequantize")]
    for engine in engines:
        engine.run(request_of(0, PROMPTS[2], 6))
    coded, plain = (engine.sampled[0] for engine in engines)
    assert matrices(engines[0].runner._model.transformer)
    assert not matrices(engines[1].runner._model.transformer)
    tiles = kernels.library._name.rpartition("/")[2].startswith("_amx")
    for position, logits in coded.items():
        if tiles:
            torch.testing.assert_close(logits, plain[position], rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(logits, plain[position])


def test_weights_are_as_small_as_in_the_checkpoint(
    written: QuantisedModel, engine_args: Make, kernels: CpuKernels
) -> None:
    model = kept(written, engine_args)
    assert len(quant_experts(model)) == 2
    own = [one for name, one in written.tensors.items() if name.endswith(("_blocks", "_scales"))]
    assert pack_quantized_experts(model, kernels) == sum(one.nbytes for one in own)
    assert not quant_experts(model)


def test_the_reference_is_the_loop_of_transformers(
    written: QuantisedModel, engine_args: Make
) -> None:
    model = kept(written, engine_args)
    for layer, (_, _, experts) in enumerate(quant_experts(model)):
        x, weights = torch.randn(5, 64), torch.rand(5, 2)
        chosen = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1]])
        expected = written.model.model.layers[layer].mlp.experts(x, chosen, weights)
        torch.testing.assert_close(experts(x, chosen, weights), expected)
        torch.testing.assert_close(experts.dequantized()(x, chosen, weights), expected)


@pytest.mark.parametrize("changes", [{"attention": "torch"}, {"quantization": "dequantize"}])
def test_plain_where_no_kernel_runs(
    changes: dict[str, Any],
    written: QuantisedModel,
    expected: dict[int, list[int]],
    served: Make,
    request_of: Make,
) -> None:
    engine = served(written.folder, **changes)
    assert not matrices(engine.runner._model.transformer)
    assert engine.run(request_of(0, PROMPTS[0], 10)) == {0: expected[0]}


def test_scales_that_no_exponent_holds(
    tmp_path: Path, served: Make, request_of: Make, kernels: CpuKernels
) -> None:
    """A block of zeros with the smallest scale: its expert has fp32 scales, or plain weights."""
    written = mxfp4_model(tmp_path)
    found = written.tensors
    for name, output in (("gate_up_proj", 4), ("down_proj", 7)):
        found[f"{EXPERTS}{name}_scales"][2, output, 0] = 0
        found[f"{EXPERTS}{name}_blocks"][2, output, 0] = 0
        weight = written.model.get_parameter(EXPERTS + name)
        weight.data[2, :32, output] = 0
    written.save(found)
    engine = served(written.folder)
    own = matrices(engine.runner._model.transformer)
    assert [one.codes for one in own if isinstance(one, CodedMatrix)].count(Codes.FP4) == 14
    assert engine.run(request_of(0, PROMPTS[0], 8)) == {0: written.greedy(PROMPTS[0], 8)}


BROKEN: dict[str, tuple[str, torch.Tensor | None, str]] = {
    "blocks of another shape": (
        *("down_proj_blocks", torch.zeros(4, 64, 2, 16, dtype=torch.uint8)),
        r"experts\.down_proj_blocks is uint8 of shape \[4, 64, 2, 16\], .* \[4, 64, 3, 16\]",
    ),
    "scales as floats": (
        *("gate_up_proj_scales", torch.zeros(4, 192, 2)),
        r"experts\.gate_up_proj_scales is float32 of shape .* wants uint8",
    ),
    "no scales": ("gate_up_proj_scales", None, r"lacks .*experts\.gate_up_proj_scales"),
    "no biases": ("down_proj_bias", None, r"lacks 1 weights, .*experts\.down_proj_bias"),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_broken(case: str, tmp_path: Path, engine_args: Make, kernels: CpuKernels) -> None:
    leaf, tensor, line = BROKEN[case]
    written = mxfp4_model(tmp_path)
    found = written.tensors
    del found[EXPERTS + leaf]
    if tensor is not None:
        found[EXPERTS + leaf] = tensor
    written.save(found)
    with pytest.raises(InvalidConfig, match=line) as caught:
        load(engine_args(written.folder))
    assert "\n" not in str(caught.value)

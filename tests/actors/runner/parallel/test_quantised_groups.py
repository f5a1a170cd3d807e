"""Groups of runners serve quantised checkpoints; codes stay codes on every rank."""

import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantised import KINDS, QuantisedModel, mxfp4_model
from rank_groups import HOST, Group, run_group
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.cpu.coded_experts import CodedExperts
from rayfin.actors.runner.cpu.packed_experts import PackedExpertsModule
from rayfin.actors.runner.cpu.packed_layers import PackedLinear
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.quantized.linear import QuantLinear
from rayfin.actors.runner.quantized.packed import CodedLinear
from rayfin.kernels.cpu.codes import CodedMatrix, Codes
from rayfin.kernels.cpu.kernels import try_kernels
from tiers import few

pytestmark = pytest.mark.slow(reason="starts groups of two and four ranks")

Make = Callable[..., Any]
OUTPUT = 8
BITS = ("int8", "int4")
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 16, 9))]
CODED = [kind for kind in KINDS if kind not in ("gptq v2", "gptq sym", "fbgemm_fp8", "modelopt")]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], QuantisedModel]:
    """format, family -> its checkpoint, written once; no test changes it."""

    @functools.cache
    def make(kind: str, family: str) -> QuantisedModel:
        folder = tmp_path_factory.mktemp("checkpoint")
        return mxfp4_model(folder) if kind == "mxfp4" else QuantisedModel(kind, family, folder)

    return make


def models(ranks: Group) -> list[nn.Module]:
    return [runner._model.transformer for runner in ranks.runners]


def plain_layers(model: nn.Module) -> list[str]:
    """Layers of the decoder that are not codes."""
    return [
        path
        for path, module in model.named_modules()
        if ".layers." in path and type(module).__name__ in ("Linear", "PackedLinear")
    ]


def require_equal(ranks: Group, written: QuantisedModel, request_of: Make) -> None:
    """Their tokens in batches and chunks, and the logits of one request."""
    requests = [request_of(key, prompt, OUTPUT) for key, prompt in enumerate(PROMPTS)]
    tokens, _, _ = run_group(ranks, requests, stagger=2)
    assert tokens == {key: written.greedy(prompt, OUTPUT) for key, prompt in enumerate(PROMPTS)}
    prompt = [90, *PROMPTS[1]]  # of which no page is known
    ranks.restart()
    ranks.record(rows := [])
    tokens, _, _ = run_group(ranks, [request_of(9, prompt, OUTPUT)])
    with torch.inference_mode():
        logits = written.model(torch.tensor([prompt + tokens[9]])).logits[0]
    expected = logits[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "family", "tensor", "stages"),
    few(
        [
            *((kind, "llama", 2, 1) for kind in KINDS),
            *(("gptq", "llama", *shape) for shape in [(1, 2), (2, 2)]),
            *(("gptq", family, 2, 1) for family in ("qwen3", "qwen2", "gpt_neox")),
            *(("gptq desc_act", family, 2, 1) for family in ("qwen3", "gpt_neox", "phi3", "gpt2")),
            *(("fp8 blocks", family, 2, 1) for family in ("phi3", "gpt2")),
            ("nf4", "gpt2", 1, 2),
        ],
        6,
    ),
)
def test_layers(
    kind: str,
    family: str,
    tensor: int,
    stages: int,
    write: Make,
    group: Make,
    request_of: Make,
) -> None:
    """The logits of the weights within 1e-4, their tokens, and no layer that is plain."""
    written = write(kind, family)
    ranks = group(written.folder, tensor, stages, max_batch_tokens=9)
    require_equal(ranks, written, request_of)
    if try_kernels(1) is not None:
        for model in models(ranks):
            assert any(isinstance(one, CodedLinear) for one in model.modules())
            assert not plain_layers(model)


OTHERS = ["qwen2_moe", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"]


@pytest.mark.parametrize(
    ("kind", "family", "tensor", "stages"),
    few(
        [
            *((kind, "qwen3_moe", 2, 1) for kind in CODED),
            *(("gptq desc_act", family, 2, 1) for family in OTHERS),
            *((kind, "mixtral", 2, 1) for kind in ("awq", "gptq desc_act")),
            *(("awq", "mixtral", *shape) for shape in [(1, 2), (2, 2)]),
            *(("mxfp4", "gpt_oss", *shape) for shape in [(2, 1), (1, 2), (2, 2)]),
        ],
        5,
    ),
)
def test_experts(
    kind: str, family: str, tensor: int, stages: int, write: Make, group: Make, request_of: Make
) -> None:
    """Each rank has a part of the width of each expert, in codes."""
    written = write(kind, family)
    ranks = group(written.folder, tensor, stages, max_batch_tokens=9)
    require_equal(ranks, written, request_of)
    if try_kernels(1) is not None:
        for model in models(ranks):
            mixtures = [one for one in model.modules() if isinstance(one, CodedExperts)]
            assert mixtures or stages > 1
            matrices = [matrix for mixture in mixtures for matrix in mixture.matrices]
            assert all(isinstance(matrix, CodedMatrix) for matrix in matrices)
            assert not [one for one in model.modules() if "gate_up_proj" in one._parameters]


@pytest.mark.parametrize(
    ("kind", "family", "changes"),
    few(
        [
            (*written, {name: value})
            for written in [
                ("gptq desc_act", "llama"),
                ("fp8 blocks", "qwen3_moe"),
                ("mxfp4", "gpt_oss"),
            ]
            for name, value in (("attention", "torch"), ("quantization", "dequantize"))
        ],
        2,
    ),
)
def test_plain(
    kind: str, family: str, changes: dict[str, Any], write: Make, group: Make, request_of: Make
) -> None:
    """Where it is asked for, or no kernel reads codes."""
    written = write(kind, family)
    ranks = group(written.folder, 2, 1, max_batch_tokens=9, **changes)
    require_equal(ranks, written, request_of)
    coded = (CodedLinear, CodedExperts)
    assert not [one for model in models(ranks) for one in model.modules() if isinstance(one, coded)]


def test_rows_rounded_to_8_bits(write: Make, group: Make, request_of: Make) -> None:
    """Each rank rounds the row that it multiplies: near the exact logits, and not equal to them."""
    if try_kernels(1) is None:
        pytest.skip("the CPU kernels are not built")
    written = write("gptq", "llama")
    ranks = group(written.folder, 2, 1, activations="int8")
    ranks.record(rows := [])
    run_group(ranks, [request_of(0, PROMPTS[0], 1)])
    with torch.inference_mode():
        expected = written.model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    difference = (torch.cat(rows)[-1] - expected).norm() / expected.norm()
    assert 0 < float(difference) < 0.1


def test_a_head_in_codes(tmp_path: Path, group: Make, request_of: Make) -> None:
    """Of 127 tokens: the last rank has one output that is zeros."""
    written = QuantisedModel("w4a16", "llama", tmp_path, vocab_size=127)
    found = written.tensors
    del found["lm_head.weight"]
    head, weight = KINDS["w4a16"].write(127, 64, torch.Generator().manual_seed(5))
    written.save(found | {f"lm_head.{leaf}": tensor for leaf, tensor in head.items()})
    written.model.lm_head.weight.data.copy_(weight)
    ranks = group(written.folder, 2, 1)
    require_equal(ranks, written, request_of)


def test_groups_that_ranks_cut_to_bits(
    tmp_path: Path, group: Make, request_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """72 inputs in groups of 32: the share of 36 has groups of 4, and its layers are plain."""
    written = QuantisedModel("awq", "llama", tmp_path, intermediate_size=72)
    with caplog.at_level(logging.INFO):
        ranks = group(written.folder, 2, 1)
    require_equal(ranks, written, request_of)
    assert re.search(
        r"2 layers, model\.layers\.\d\.mlp\.down_proj among them, are plain", caplog.text
    )
    assert "tensor_parallel_size 1 leaves them whole" in caplog.text
    if try_kernels(1) is not None:
        plain = [path for model in models(ranks) for path in plain_layers(model)]
        assert len(plain) == 4 and all(".mlp.down_proj" in path for path in plain)


def test_cut_groups_are_logged(write: Make, group: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        group(write("w4a16", "llama").folder, 2, 1, max_batch_tokens=8)
    assert "have groups of 16 inputs instead of 32: ranks cut them" in caplog.text


def test_experts_of_which_some_are_exact(tmp_path: Path, group: Make, request_of: Make) -> None:
    written = QuantisedModel("gptq", "qwen3_moe", tmp_path)
    found, experts = written.tensors, "model.layers.1.mlp.experts"
    module = written.model.get_submodule(experts)
    gate, up = module.gate_up_proj[2].detach().chunk(2)
    weights = {"gate_proj": gate, "up_proj": up, "down_proj": module.down_proj[2].detach()}
    for name, weight in weights.items():
        for leaf in ("qweight", "qzeros", "scales", "g_idx"):
            del found[f"{experts}.2.{name}.{leaf}"]
        found[f"{experts}.2.{name}.weight"] = weight
    written.save(found)
    require_equal(group(written.folder, 2, 1), written, request_of)


@pytest.mark.parametrize(
    ("kind", "family", "tensor", "words"),
    [
        ("awq", "llama", 4, "(4) does not divide the model's num_key_value_heads (2)"),
        ("awq", "llama", 3, "(3) does not divide the model's num_attention_heads (4)"),
        ("awq", "qwen3_moe", 4, "(4) does not divide the model's num_key_value_heads (2)"),
    ],
)
def test_sizes_that_are_refused(
    kind: str, family: str, tensor: int, words: str, write: Make, engine_args: Make
) -> None:
    args = engine_args(write(kind, family).folder)
    with pytest.raises(InvalidConfig, match=re.escape(words)) as refused:
        ModelRunner(args, ParallelRank(0, tensor, 1, (HOST, 1), HOST))
    assert refused.value.param == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("form", "bits"),
    few(
        [(form, bits) for form in ("llama", "gpt_oss", "gpt2", "qwen3_moe") for bits in BITS],
        3,
    ),
)
def test_plain_weights_that_ranks_round(
    form: str, bits: str, tiny_model: Make, served: Make, group: Make, request_of: Make
) -> None:
    """The same in any company. Errors of tiny models scatter: at most 2.5 times one device's."""
    if try_kernels(1) is None:
        pytest.skip("the CPU kernels are not built")
    tiny = tiny_model(form)
    ranks = group(tiny.folder, 2, 1, max_batch_tokens=9, quantization=bits)
    alone: dict[int, list[int]] = {}
    for key, prompt in enumerate(PROMPTS):
        ranks.restart()
        ranks.record(rows := [])
        alone |= run_group(ranks, [request_of(key, prompt, OUTPUT)])[0]
    engine = served(tiny.folder, quantization=bits)
    engine.run(request_of(0, PROMPTS[-1], 1))
    with torch.inference_mode():
        expected = tiny.model(torch.tensor([PROMPTS[-1]])).logits[0, -1]
    one, several = (
        float((logits - expected).norm())
        for logits in (engine.sampled[0][len(PROMPTS[-1])], torch.cat(rows)[0])
    )
    assert 0 < several < 2.5 * one
    ranks.restart()
    requests = [request_of(key, prompt, OUTPUT) for key, prompt in enumerate(PROMPTS)]
    assert run_group(ranks, requests, stagger=2)[0] == alone
    for model in models(ranks):
        layers = [one._weight for one in model.modules() if isinstance(one, PackedLinear)]
        mixtures = [one.experts for one in model.modules() if isinstance(one, PackedExpertsModule)]
        layers += [own for experts in mixtures for own in (*experts.gate_up, *experts.down)]
        head = model.lm_head.shard._weight
        assert layers
        for own in layers:
            assert isinstance(own, CodedMatrix) and own.rounds_rows
            levels = own is not head and bits == "int4"
            assert own.codes in ((Codes.LEVELS4, Codes.LEVELS6) if levels else (Codes.INT8,))


def test_dummy_weights_are_plain(write: Make, group: Make, request_of: Make) -> None:
    ranks = group(write("gptq", "llama").folder, 2, 1, load_format="dummy")
    tokens, _, _ = run_group(ranks, [request_of(0, PROMPTS[0], OUTPUT)])
    assert len(tokens[0]) == OUTPUT
    kinds = (CodedLinear, QuantLinear)
    assert not [one for model in models(ranks) for one in model.modules() if isinstance(one, kinds)]


def test_a_format_without_a_layer_of_it(tmp_path: Path, engine_args: Make) -> None:
    written = QuantisedModel("gptq", "llama", tmp_path)
    written.save(written.model.state_dict())
    args = engine_args(written.folder)
    with pytest.raises(InvalidConfig, match="names 'gptq', and the checkpoint has no such layer"):
        ModelRunner(args, ParallelRank(0, 2, 1, (HOST, 1), HOST))


LAYER = "model.layers.0.self_attn.q_proj."
BROKEN: dict[str, tuple[str, str, torch.Tensor | None, str]] = {
    "no scales": ("gptq", "scales", None, "lacks .*q_proj.scales, which its gptq layers need"),
    "a short tensor": ("awq", "qweight", torch.zeros(8, 8).int(), r"qweight has shape \[8, 8\]"),
    "groups that do not exist": (
        *("gptq", "g_idx", torch.full((64,), 7).int()),
        "q_proj: g_idx does not put the 64 inputs into groups of 32",
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_broken(case: str, tmp_path: Path, engine_args: Make) -> None:
    """One line that names the tensor, as on one device."""
    kind, leaf, tensor, line = BROKEN[case]
    written = QuantisedModel(kind, "llama", tmp_path)
    found = written.tensors
    del found[LAYER + leaf]
    written.save(found if tensor is None else found | {LAYER + leaf: tensor})
    args = engine_args(written.folder, quantization="dequantize")
    with pytest.raises(InvalidConfig, match=line) as refused:
        ModelRunner(args, ParallelRank(0, 2, 1, (HOST, 1), HOST))
    assert refused.value.param == "quantization" and "\n" not in str(refused.value)


def test_codes_where_a_plain_weight_belongs(tmp_path: Path, engine_args: Make, write: Make) -> None:
    """A tensor of 8 bits without its scale is no weight."""
    written = QuantisedModel("fp8", "llama", tmp_path)
    found = written.tensors
    found["model.norm.weight"] = found["model.norm.weight"].to(torch.float8_e4m3fn)
    written.save(found)
    with pytest.raises(InvalidConfig, match="model.norm.weight as float8_e4m3fn"):
        ModelRunner(engine_args(written.folder), ParallelRank(0, 2, 1, (HOST, 1), HOST))

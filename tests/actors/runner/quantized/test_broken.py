"""Checkpoints that cannot be served: one line each, which names the tensor or the setting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantised import KINDS, QuantisedModel, mxfp4_model
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.loading import load

Make = Callable[..., Any]
LAYER = "model.layers.0.self_attn.q_proj."


def settings(**changes: Any) -> Callable[[QuantisedModel, str], None]:
    def change(model: QuantisedModel, kind: str) -> None:
        model.change_config(quantization_config={**KINDS[kind].config, **changes})

    return change


def tensors(**changes: torch.Tensor | None) -> Callable[[QuantisedModel, str], None]:
    """Replaces tensors of a layer, or drops them."""

    def change(model: QuantisedModel, kind: str) -> None:
        found = model.tensors
        for leaf, tensor in changes.items():
            if tensor is None:
                del found[LAYER + leaf]
            else:
                found[LAYER + leaf] = tensor
        model.save(found)

    return change


def weights(**changes: Any) -> Callable[[QuantisedModel, str], None]:
    """Changes compressed-tensors' settings of weights."""

    def change(model: QuantisedModel, kind: str) -> None:
        config = KINDS[kind].config
        group = config["config_groups"]["group_0"]
        changed = {**group, "weights": {**group["weights"], **changes}}
        whole = {**config, "config_groups": {"group_0": changed}}
        model.change_config(quantization_config=whole)

    return change


def plain(model: QuantisedModel, kind: str) -> None:
    """Weights that are not quantised, under a configuration that says they are."""
    whole = {name: t for name, t in model.tensors.items() if "layers" not in name}
    whole |= {name: tensor for name, tensor in model.model.state_dict().items() if "layers" in name}
    model.save(whole)


def state(model: QuantisedModel, kind: str) -> None:
    found = model.tensors
    del found[f"{LAYER}weight.quant_state.bitsandbytes__nf4"]
    model.save(found)


INTS = torch.zeros(8, 64, dtype=torch.int32)
BROKEN: dict[str, tuple[str, Any, str]] = {
    "unknown method": ("gptq", settings(quant_method="vptq"), "'vptq'; known ones are awq,"),
    "three bits": ("gptq", settings(bits=3), "bits 3; 2 or 4 or 8 is served"),
    "a group of 0": ("gptq", settings(group_size=0), "group_size 0"),
    "marlin": ("gptq", settings(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
    "another group": (
        "gptq",
        settings(group_size=16),
        r"qzeros has shape \[2, 8\].*wants \[4, 8\]",
    ),
    "other bits": ("gptq", settings(bits=8), r"qweight has shape \[8, 64\]"),
    "no scales": ("gptq", tensors(scales=None), "lacks .*q_proj.scales"),
    "no codes": ("gptq", tensors(qweight=None), "lacks .*q_proj.qweight"),
    "no zeros": ("awq", tensors(qzeros=None), "lacks .*q_proj.qzeros"),
    "codes as floats": (
        "gptq",
        tensors(qweight=INTS.float()),
        "holds float32, and gptq wants int32",
    ),
    "scales as integers": ("awq", tensors(scales=torch.zeros(2, 64).int()), "holds int32"),
    "a short tensor": ("awq", tensors(qweight=INTS[:, :8]), r"qweight has shape \[8, 8\]"),
    "groups that do not exist": (
        *("gptq", tensors(g_idx=torch.full((64,), 7).int())),
        "q_proj: g_idx does not put the 64 inputs into groups of 32",
    ),
    "two formats": ("gptq", tensors(weight_packed=INTS), "weight_packed is not of the format"),
    "gemv": ("awq", settings(version="gemv"), "version 'gemv' of AWQ; gemm is served"),
    "nvfp4 of integers": (
        *("w4a16", settings(format="nvfp4-pack-quantized")),
        "'nvfp4-pack-quantized' of 4 bits, type 'int'",
    ),
    "no scale of all": (
        *("nvfp4", tensors(weight_global_scale=None)),
        "lacks .*q_proj.weight_global_scale",
    ),
    "a scale of all that is 0": (
        *("nvfp4", tensors(weight_global_scale=torch.zeros(1))),
        "q_proj: weight_global_scale is 0.0",
    ),
    "blocks of 32": (
        *("modelopt nvfp4", tensors(weight_scale=torch.ones(64, 2).to(torch.float8_e4m3fn))),
        r"weight_scale has shape \[64, 2\].*wants \[64, 4\]",
    ),
    "factors on inputs": (
        *("modelopt nvfp4", tensors(pre_quant_scale=torch.ones(64))),
        "q_proj: pre_quant_scale",
    ),
    "no groups": ("w4a16", settings(config_groups={}), "has no config_groups"),
    "a strategy": ("w4a16", weights(strategy="token"), "strategy 'token'"),
    "another shape": (
        *("w4a16", tensors(weight_shape=torch.tensor([64, 60]))),
        r"q_proj: weight_shape says \[64, 60\]",
    ),
    "no fp8 scale": ("fp8", tensors(weight_scale=None), "lacks .*q_proj.weight_scale"),
    "e5m2": ("fp8", settings(fmt="e5m2"), "fp8 numbers of 'e5m2'"),
    "blocks": ("fp8 blocks", settings(weight_block_size=[128]), r"blocks of \[128\]"),
    "modelopt": ("modelopt", settings(quant_algo="W4A16_AWQ"), "'W4A16_AWQ' of modelopt; served"),
    "one of modelopt's layers": (
        *(
            "modelopt",
            settings(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "MXFP8"}}),
        ),
        "quant_algo 'MXFP8' of modelopt",
    ),
    "no scale of modelopt's": (
        *("modelopt nvfp4", tensors(weight_scale_2=None)),
        "lacks .*q_proj.weight_scale_2",
    ),
    "no state": ("nf4", state, "lacks .*q_proj.weight_quant_state"),
    "settings that are no object": (
        *("w4a16", settings(config_groups=["group_0"])),
        "quantization_config cannot be read: 'list' object",
    ),
    "weights that are no object": (
        *("w4a16", settings(config_groups={"group_0": {"weights": "int4"}})),
        "quantization_config cannot be read: 'str' object",
    ),
    "a pattern of layers": (
        *("gptq", settings(dynamic={"+:(": {}})),
        "quantization_config cannot be read: missing \\)",
    ),
    "plain weights": ("gptq", plain, "names 'gptq', and the checkpoint has no such layer"),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_broken(case: str, tmp_path: Path, engine_args: Make) -> None:
    kind, change, line = BROKEN[case]
    written = QuantisedModel(kind, "llama", tmp_path)
    change(written, kind)
    with pytest.raises(InvalidConfig, match=line) as caught:
        load(engine_args(written.folder))
    assert caught.value.param == "quantization"
    assert "\n" not in str(caught.value)


EXPERT = "model.layers.1.mlp.experts.2.down_proj."
EXPERTS = [
    *((kind, leaf) for kind in ("gptq", "awq") for leaf in ("qweight", "qzeros", "scales")),
    *(("w4a16", leaf) for leaf in ("weight_packed", "weight_scale")),
    *(("fp8 blocks", leaf) for leaf in ("weight", "weight_scale_inv")),
    ("modelopt nvfp4", "weight_scale_2"),
]


@pytest.mark.parametrize("kind, leaf", EXPERTS)
def test_an_expert_lacks_a_tensor(kind: str, leaf: str, tmp_path: Path, engine_args: Make) -> None:
    written = QuantisedModel(kind, "qwen3_moe", tmp_path)
    found = written.tensors
    del found[EXPERT + leaf]
    written.save(found)
    line = rf"lacks .*experts\.2\.down_proj\.{leaf}, which"
    with pytest.raises(InvalidConfig, match=line) as caught:
        load(engine_args(written.folder))
    assert caught.value.param == "quantization"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_experts_in_mxfp4_lack_their_scales(part: str, tmp_path: Path, engine_args: Make) -> None:
    written = mxfp4_model(tmp_path)
    found = written.tensors
    del found[f"model.layers.1.mlp.experts.{part}_scales"]
    written.save(found)
    with pytest.raises(InvalidConfig, match=rf"lacks model.*experts\.{part}_scales, which"):
        load(engine_args(written.folder))


@pytest.mark.parametrize("kind", ["fp8", None])
def test_rows_that_are_not_rounded(
    kind: str | None, tmp_path: Path, engine_args: Make, tiny_model: Make
) -> None:
    """Only products with integers round them."""
    folder = QuantisedModel(kind, "llama", tmp_path).folder if kind else tiny_model("llama").folder
    with pytest.raises(InvalidConfig, match="has no such layer") as caught:
        load(engine_args(folder, activations="int8"))
    assert caught.value.param == "activations"


def test_rows_in_fp8_on_a_cpu(tmp_path: Path, engine_args: Make) -> None:
    written = QuantisedModel("fp8", "llama", tmp_path)
    with pytest.raises(InvalidConfig, match="activations 'fp8' is for a GPU") as caught:
        load(engine_args(written.folder, activations="fp8", device="cpu"))
    assert caught.value.param == "activations"


def test_rounding_what_is_quantised(tmp_path: Path, engine_args: Make) -> None:
    written = QuantisedModel("gptq", "llama", tmp_path)
    with pytest.raises(InvalidConfig, match=r"holds quantized ones \(gptq\)") as caught:
        load(engine_args(written.folder, quantization="int8"))
    assert caught.value.param == "quantization"

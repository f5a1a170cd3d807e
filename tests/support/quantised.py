"""Writes tiny checkpoints in every served format, and the model that they stand for.

Codes, scales and zero points are drawn at random; the weight is what the format's paper makes of
them. Packing is spelled out here, one shift for each place of a word.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rayfin.kernels.grouped import E2M1

GROUP = 32
Tensors = dict[str, torch.Tensor]
Writer = Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]
"""(outputs, inputs, randomness) -> the tensors of a layer by their names, and its weight."""

_BASE: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    **{"tie_word_embeddings": False, "initializer_range": 0.2},
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1},
}
_MLA: dict[str, Any] = {
    **{**_ROUTED, "n_group": 2, "topk_group": 1, "head_dim": 8},
    **{"q_lora_rank": None, "kv_lora_rank": 32, "num_key_value_heads": 4},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _MOE,
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "olmoe": {**_MOE, "intermediate_size": 32, "num_key_value_heads": 4},
    "glm4_moe": _ROUTED,
    "deepseek_v2": {**_MLA, "topk_method": "greedy"},
    "deepseek_v3": _MLA,
    "qwen3_next": {
        **{**_MOE, "shared_expert_intermediate_size": 32},
        **{"layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
    "gpt_oss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        "swiglu_limit": 1.5,  # many numbers reach it
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
EXACT = ("embed", "lm_head", "norm", "router", "gate.weight", "embed_out", "wte", "wpe")
TURNED = (".attn.c_attn.", ".c_proj.", ".c_fc.")
"""GPT-2's layers, whose plain weights are [inputs, outputs]."""


def pack(values: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """[R, C] -> [R, C * bits / 32] int32; value i of a word lies at place ``places[i]``."""
    each = 32 // bits
    words = torch.zeros(values.shape[0], values.shape[1] // each, dtype=torch.int64)
    for i in range(each):
        words |= values[:, i::each].long() << bits * (places[i] if places else i)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def spread(groups: torch.Tensor, inputs: int, group: int) -> torch.Tensor:
    return groups.float().repeat_interleave(group, dim=1)[:, :inputs]


def drawn(
    outputs: int, inputs: int, group: int, bits: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], zero points and scales [N, G] in half precision."""
    groups = -(-inputs // group)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=random)
    zeros = torch.randint(1, 2**bits, (outputs, groups), generator=random)
    scales = (0.5 + torch.rand(outputs, groups, generator=random)) * 0.8 / 2**bits
    return codes, zeros, scales.half()


def gptq(bits: int = 4, version: int = 1, act_order: bool = False, sym: bool = False) -> Writer:
    def write(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales = drawn(outputs, inputs, GROUP, bits, random)
        if sym:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        g_idx = torch.arange(inputs) // GROUP
        if act_order:  # of all layers that read the same rows, as GPTQ does
            g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        weight = (codes - zeros[:, g_idx]) * scales.float()[:, g_idx]
        tensors = {
            "qweight": pack(codes, bits).T.contiguous(),
            "qzeros": pack((zeros - int(version == 1)).T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": g_idx.int(),
        }
        return tensors, weight

    return write


def awq(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = drawn(outputs, inputs, GROUP, 4, random)
    weight = (codes - spread(zeros, inputs, GROUP)) * spread(scales, inputs, GROUP)
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {"qweight": pack(codes.T, 4, places), "qzeros": pack(zeros.T, 4, places)}
    return {**tensors, "scales": scales.T.contiguous()}, weight


def packed(
    bits: int = 4, group: int | None = GROUP, sym: bool = True, order: bool = False
) -> Writer:
    def write(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales = drawn(outputs, inputs, group or inputs, bits, random)
        if sym:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        tensors = {
            "weight_packed": pack(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not sym:
            tensors["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
        g_idx = torch.arange(inputs) // (group or inputs)
        if order:
            g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
            tensors["weight_g_idx"] = g_idx.int()
        weight = (codes - zeros[:, g_idx]) * scales.bfloat16().float()[:, g_idx]
        return tensors, weight

    return write


def int8(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(-127, 128, (outputs, inputs), generator=random).to(torch.int8)
    scale = ((0.5 + torch.rand(outputs, 1, generator=random)) / 300).bfloat16()
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8(name: str = "weight_scale", block: int | None = None, shape: str = "channel") -> Writer:
    def write(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = (torch.randn(outputs, inputs, generator=random) * 60).clamp(-448, 448)
        values = codes.to(torch.float8_e4m3fn)
        if block:
            rows, columns = -(-outputs // block), -(-inputs // block)
            scale = (0.5 + torch.rand(rows, columns, generator=random)) / 300
            wide = scale.repeat_interleave(block, 0)[:outputs].repeat_interleave(block, 1)
            weight = values.float() * wide[:, :inputs]
        elif shape == "channel":
            scale = (0.5 + torch.rand(outputs, 1, generator=random)) / 300
            weight = values.float() * scale
        else:
            scale = torch.tensor(0.004)
            weight = values.float() * scale
        return {"weight": values, name: scale}, weight

    return write


def nf4(nested: bool) -> Writer:
    table = torch.linspace(-1, 1, 16) ** 3

    def write(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(0, 16, (outputs, inputs), generator=random)
        absmax = 0.2 + 0.3 * torch.rand(outputs * inputs // GROUP, generator=random)
        state: dict[str, Any] = {"blocksize": GROUP, "quant_type": "nf4", "dtype": "float32"}
        tensors = {}
        if nested:
            numbers, offset = torch.linspace(-1, 1, 256), 0.35
            octets = torch.randint(0, 256, (len(absmax),), generator=random)
            each = 0.1 + 0.05 * torch.rand(-(-len(absmax) // 256), generator=random)
            absmax = numbers[octets] * each.repeat_interleave(256)[: len(absmax)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset}
            tensors |= {"weight.nested_absmax": each, "weight.nested_quant_map": numbers.clone()}
        flat = codes.flatten()
        tensors |= {
            "weight": (flat[::2] << 4 | flat[1::2]).to(torch.uint8).unsqueeze(1),
            "weight.absmax": octets.to(torch.uint8) if nested else absmax,
            "weight.quant_map": table.clone(),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        wide = absmax.view(outputs, -1).repeat_interleave(GROUP, dim=1)
        return tensors, table[codes] * wide

    return write


def mxfp4(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(0, 16, (outputs, inputs), generator=random)
    exponents = torch.randint(120, 125, (outputs, inputs // 32), generator=random)
    scale = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors = {"weight_packed": packed, "weight_scale": exponents.to(torch.uint8)}
    return tensors, torch.tensor(E2M1)[codes] * scale


def nvfp4(codes: str, whole: str, divides: bool) -> Writer:
    """Scales of layers that share their inputs are one in the real tools' checkpoints too."""

    def write(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        values = torch.randint(0, 16, (outputs, inputs), generator=random)
        scale = 100 * (0.5 + torch.rand(outputs, inputs // 16, generator=random))
        scale = scale.to(torch.float8_e4m3fn)
        every = torch.tensor([4.3 * inputs**1.5 if divides else 0.23 / inputs**1.5])
        tensors = {codes: (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)}
        tensors |= {"weight_scale": scale, whole: every if divides else every[0].clone()}
        unread = "input_global_scale" if divides else "input_scale"
        wide = scale.float().repeat_interleave(16, 1)
        weight = torch.tensor(E2M1)[values] * (wide / every if divides else wide * every)
        return {**tensors, unread: torch.tensor([3.0])}, weight

    return write


def bnb_int8(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(-127, 128, (outputs, inputs), generator=random).to(torch.int8)
    largest = 0.3 + torch.rand(outputs, generator=random) / 5
    return {"weight": codes, "SCB": largest}, codes.float() * (largest / 127).unsqueeze(1)


@dataclass(frozen=True)
class Kind:
    """A format: what writes a layer, and the configuration that says so."""

    write: Writer
    config: dict[str, Any]


def _gptq_config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False} | changes


def _packed_config(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"} | weights}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]},
        **{"quantization_status": "compressed", "config_groups": {"group_0": group}},
    }


_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": GROUP, "symmetric": True}
KINDS: dict[str, Kind] = {
    "gptq": Kind(gptq(), _gptq_config()),
    "gptq sym": Kind(gptq(sym=True), _gptq_config(sym=True)),
    "gptq v2": Kind(gptq(version=2), _gptq_config(checkpoint_format="gptq_v2")),
    "gptq desc_act": Kind(gptq(act_order=True), _gptq_config(desc_act=True)),
    "gptq 8 bits": Kind(gptq(bits=8), _gptq_config(bits=8)),
    "awq": Kind(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "w4a16": Kind(packed(), _packed_config(**_GROUPS)),
    "w4a16 asym": Kind(packed(sym=False), _packed_config(**{**_GROUPS, "symmetric": False})),
    "w4a16 actorder": Kind(packed(order=True), _packed_config(**_GROUPS, actorder="group")),
    "w8a16": Kind(packed(8, None), _packed_config(num_bits=8, strategy="channel")),
    "mxfp4 packed": Kind(
        mxfp4,
        _packed_config("mxfp4-pack-quantized", **{**_GROUPS, "group_size": 32, "type": "float"}),
    ),
    "nvfp4": Kind(
        nvfp4("weight_packed", "weight_global_scale", True),
        _packed_config(
            "nvfp4-pack-quantized", strategy="tensor_group", group_size=16, type="float"
        ),
    ),
    "modelopt nvfp4": Kind(
        nvfp4("weight", "weight_scale_2", False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
    "w8a8": Kind(int8, _packed_config("int-quantized", num_bits=8, strategy="channel")),
    "float-quantized": Kind(
        fp8(), _packed_config("float-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "fp8": Kind(fp8(shape="tensor"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 blocks": Kind(
        fp8("weight_scale_inv", block=GROUP),
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
    ),
    "fbgemm_fp8": Kind(fp8(), {"quant_method": "fbgemm_fp8"}),
    "modelopt": Kind(fp8(shape="tensor"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nf4": Kind(nf4(False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4 nested": Kind(nf4(True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "llm.int8": Kind(bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


class QuantisedModel:
    """A checkpoint in ``folder``, and transformers' model with the weights that it stands for."""

    def __init__(self, kind: str, family: str, folder: Path, **changes: Any) -> None:
        self.folder = folder / "quantised"
        torch.manual_seed(1)
        config = AutoConfig.for_model(family, **{**_BASE, **FAMILIES[family], **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() < 2 and "norm" not in name:
                    parameter.normal_(0.0, 0.2)
        plain = folder / "plain"
        model.save_pretrained(plain)
        model.save_pretrained(self.folder)
        tensors = load_file(plain / "model.safetensors")
        written, dense = write_layers(KINDS[kind].write, tensors)
        save_file(written, self.folder / "model.safetensors", {"format": "pt"})
        save_file(dense, plain / "model.safetensors", {"format": "pt"})
        self.change_config(quantization_config=KINDS[kind].config)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32
        ).eval()

    def change_config(self, **changes: Any) -> None:
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    @property
    def tensors(self) -> Tensors:
        return load_file(self.folder / "model.safetensors")

    def save(self, tensors: Tensors) -> None:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, self.folder / "model.safetensors", {"format": "pt"})

    @torch.inference_mode()
    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What transformers samples without a stop token, computed anew for each token."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]


def write_layers(write: Writer, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors with linear layers in the format, and with the weights that these stand for."""
    random = torch.Generator().manual_seed(3)
    written, dense = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        exact = any(part in name for part in EXACT)
        if exact or weight.dim() != 2 or not name.endswith(".weight"):
            continue
        is_turned = any(part in name for part in TURNED)
        layer, number = write(*(weight.T if is_turned else weight).shape, random)
        del written[name]
        written |= {name.removesuffix("weight") + leaf: tensor for leaf, tensor in layer.items()}
        dense[name] = (number.T if is_turned else number).float().contiguous()
    return written, dense


def mxfp4_model(folder: Path) -> QuantisedModel:
    """gpt-oss with its experts in blocks of 32 4-bit floats."""
    found = QuantisedModel.__new__(QuantisedModel)
    found.folder = folder / "quantised"
    torch.manual_seed(1)
    config = AutoConfig.for_model("gpt_oss", **{**_BASE, **FAMILIES["gpt_oss"]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([numbers, -numbers])
    model.save_pretrained(found.folder)
    written = found.tensors
    for name, weight in list(written.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        codes = torch.randint(0, 16, (*shape, 32))
        exponents = torch.randint(-5, -2, shape)
        dense = (table[codes] * 2.0 ** exponents.unsqueeze(-1)).flatten(-2).mT
        del written[name]
        written[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        written[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        model.get_parameter(name).data.copy_(dense)
    found.save(written)
    found.change_config(quantization_config={"quant_method": "mxfp4"})
    found.model = model.eval()
    return found

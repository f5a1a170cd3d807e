"""Reads a checkpoint's ``quantization_config``: which format each layer is stored in."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from rayfin.actors.model_files.files import model_json
from rayfin.actors.runner.quantized.formats import (
    E4M3,
    MX_BLOCK,
    NV_BLOCK,
    Awq,
    Format,
    Gptq,
    Nf4,
    Nvfp4,
    Packed,
    PackedFloats,
    Plain,
    refuse,
)
from rayfin.actors.runner.quantized.gguf_blocks import Gguf

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Config = Mapping[str, Any]

MODELOPT_FILE = "hf_quant_config.json"
"""What exports of NVIDIA's ModelOpt hold; older ones say nothing in config.json."""


def source_config(config: "PretrainedConfig") -> dict[str, Any] | None:
    """The checkpoint's ``quantization_config``, or None if its weights are plain."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        text = config.get_text_config(decoder=True)
        quantization = getattr(text, "quantization_config", None)
    if quantization is None or isinstance(quantization, dict):
        return quantization
    if not hasattr(quantization, "to_dict"):
        raise refuse(f"the checkpoint's quantization_config is {quantization!r}, and not an object")
    return dict(quantization.to_dict())


def adopt_modelopt(config: "PretrainedConfig", model: str, **hub: Any) -> None:
    """Gives a configuration without ``quantization_config`` what ModelOpt has in a file beside it.

    Raises:
        InvalidConfig: The file is not a JSON object.
    """
    if source_config(config) is None and (exported := model_json(model, MODELOPT_FILE, **hub)):
        config.quantization_config = {"quant_method": "modelopt", **exported}


@dataclass(frozen=True)
class Formats:
    """The format of most layers, and those of others by their names."""

    method: str
    default: Format
    others: tuple[tuple[re.Pattern[str], Format], ...] = field(default=())
    experts: str | None = None  # the format of experts that are stored for themselves
    tied: bool = False  # the embedding is the head's codes

    def of(self, name: str) -> Format:
        """The format of the layer ``name``, if it is quantised at all."""
        for pattern, other in self.others:
            if pattern.search(name):
                return other
        return self.default


def read_formats(source: Config) -> Formats:
    """The formats of a checkpoint's configuration.

    Raises:
        InvalidConfig: The method is unknown, or a setting of it is not served.
    """
    method = source.get("quant_method")
    if method is None and source.get("quant_algo"):
        method = "modelopt"
    if method is None and (source.get("load_in_4bit") or source.get("load_in_8bit")):
        method = "bitsandbytes"
    reader = READERS.get(str(getattr(method, "value", method)))
    if reader is None:
        raise refuse(
            f"the checkpoint's quant_method is {method!r}; known ones are "
            f"{', '.join(sorted(READERS))}"
        )
    try:
        return reader(source)
    except (TypeError, ValueError, KeyError, AttributeError, re.error) as error:
        why = " ".join(str(error).split())
        raise refuse(f"the checkpoint's quantization_config cannot be read: {why}") from error


def _bits(source: Config, key: str, served: tuple[int, ...]) -> int:
    bits = source.get(key)
    if bits not in served:
        names = " or ".join(map(str, served))
        raise refuse(f"the checkpoint has {key} {bits!r}; {names} is served")
    return int(bits)


def _group(source: Config, key: str) -> int | None:
    size = source.get(key, -1)
    if size in (-1, None):
        return None
    if not isinstance(size, int) or size < 1:
        raise refuse(f"the checkpoint has {key} {size!r}; a positive number or -1 is served")
    return size


def _gptq(source: Config) -> Formats:
    named = source.get("checkpoint_format", source.get("format"))
    version = 2 if named == "gptq_v2" or source.get("quant_method") == "gptq_v2" else 1
    if named not in (None, "gptq", "gptq_v2"):
        raise refuse(f"the checkpoint has checkpoint_format {named!r}; gptq or gptq_v2 is served")
    bits, group = _bits(source, "bits", (2, 4, 8)), _group(source, "group_size")
    default = Gptq(bits, group, "gptq", version=version)
    others = []
    for pattern, changes in (source.get("dynamic") or {}).items():
        merged = {**source, **(changes or {})}  # a pattern after "-:" names layers that stay exact
        other = replace(
            default, bits=_bits(merged, "bits", (2, 4, 8)), group=_group(merged, "group_size")
        )
        others.append((re.compile(pattern.removeprefix("+:").removeprefix("-:")), other))
    return Formats("gptq", default, tuple(others))


def _awq(source: Config) -> Formats:
    version = str(source.get("version", "gemm")).lower()
    if version != "gemm":
        raise refuse(f"the checkpoint has version {version!r} of AWQ; gemm is served")
    key = "w_bit" if "w_bit" in source else "bits"
    size = "q_group_size" if "q_group_size" in source else "group_size"
    return Formats("awq", Awq(_bits(source, key, (4,)), _group(source, size), "awq"))


def _compressed_tensors(source: Config) -> Formats:
    name = str(source.get("format"))
    groups = source.get("config_groups") or {}
    if not groups:
        raise refuse("the checkpoint's compressed-tensors configuration has no config_groups")
    status = source.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise refuse(f"the checkpoint has quantization_status {status!r}; compressed is served")
    formats = []
    for group in groups.values():
        scheme = _scheme(str(group.get("format") or name), group.get("weights") or {})
        for target in group.get("targets") or ["Linear"]:
            formats.append((str(target), scheme))
    others = tuple(
        (
            re.compile(target[3:] if target.startswith("re:") else rf"(^|\.){re.escape(target)}$"),
            one,
        )
        for target, one in formats
        if target != "Linear"
    )
    default = next((one for target, one in formats if target == "Linear"), formats[0][1])
    return Formats("compressed-tensors", default, others)


def _scheme(name: str, weights: Config) -> Format:
    """The format of a group of layers in compressed-tensors."""
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    method = f"compressed-tensors {name}"
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        raise refuse(f"the checkpoint has strategy {strategy!r} for weights")
    if name == "pack-quantized":
        bits = _bits(weights, "num_bits", (4, 8))
        if strategy not in ("group", "channel") or kind != "int":
            raise refuse(f"{name} with strategy {strategy!r} and type {kind!r} is not served")
        group = _group(weights, "group_size") if strategy == "group" else None
        return Packed(bits, group, method, symmetric=bool(weights.get("symmetric", True)))
    if name == "mxfp4-pack-quantized" and (bits, kind, strategy) == (4, "float", "group"):
        return PackedFloats(4, MX_BLOCK, method)
    if name == "nvfp4-pack-quantized" and (bits, kind) == (4, "float"):
        return Nvfp4(4, NV_BLOCK, method)
    dtypes = {"int": torch.int8, "float": E4M3}
    plain = name in ("int-quantized", "float-quantized", "naive-quantized")
    if not plain or bits != 8 or kind not in dtypes or strategy == "group":
        raise refuse(
            f"compressed-tensors {name!r} of {bits} bits, type {kind!r}, strategy "
            f"{strategy!r} is not served; pack-quantized of 4 and 8 bits, mxfp4-pack-quantized, "
            "nvfp4-pack-quantized, int-quantized and float-quantized of 8 bits are"
        )
    if not weights.get("symmetric", True):
        raise refuse(f"{name} with zero points (symmetric false) is not served")
    plain_format = Plain(8, None, method, dtype=dtypes[kind])
    if strategy == "block":
        outputs, inputs = _block(weights.get("block_structure"))
        return replace(plain_format, group=inputs, block=outputs)
    return plain_format


def _block(size: Any) -> tuple[int, int]:
    if (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(isinstance(n, int) and n > 0 for n in size)
    ):
        return int(size[0]), int(size[1])
    raise refuse(f"the checkpoint has blocks of {size!r}; two positive numbers are served")


def _fp8(source: Config) -> Formats:
    if (kind := source.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise refuse(f"the checkpoint has fp8 numbers of {kind!r}; e4m3 is served")
    size = source.get("weight_block_size")
    plain = Plain(8, None, "fp8", scale="weight_scale_inv" if size else "weight_scale", dtype=E4M3)
    if size is not None:
        outputs, inputs = _block(size)
        plain = replace(plain, group=inputs, block=outputs)
    return Formats("fp8", plain)


def _fbgemm(source: Config) -> Formats:
    return Formats("fbgemm_fp8", Plain(8, None, "fbgemm_fp8", dtype=E4M3))


MODELOPT_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
MODELOPT_NVFP4 = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")


def _modelopt(source: Config) -> Formats:
    inner = source.get("quantization") or source
    algorithm, layers = inner.get("quant_algo"), inner.get("quantized_layers") or {}
    mixed = algorithm == "MIXED_PRECISION"
    for one in [layer.get("quant_algo") for layer in layers.values()] if mixed else [algorithm]:
        if one not in MODELOPT_FP8 + MODELOPT_NVFP4:
            served = ", ".join(MODELOPT_FP8 + MODELOPT_NVFP4)
            raise refuse(f"the checkpoint has quant_algo {one!r} of modelopt; served are {served}")
    if algorithm in MODELOPT_FP8:
        return Formats("modelopt", Plain(8, None, "modelopt", dtype=E4M3))
    names: dict[str, Any] = {"codes": "weight", "whole": "weight_scale_2", "is_divisor": False}
    return Formats("modelopt", Nvfp4(4, NV_BLOCK, "modelopt NVFP4", **names, mixed=mixed))


def _mxfp4(source: Config) -> Formats:
    return Formats("mxfp4", Plain(8, None, "mxfp4", dtype=E4M3), experts="mxfp4")


def _bitsandbytes(source: Config) -> Formats:
    if source.get("load_in_8bit"):
        return Formats("bitsandbytes", Plain(8, None, "bitsandbytes", scale="SCB", divisor=127.0))
    return Formats("bitsandbytes", Nf4(4, None, "bitsandbytes"))


def _gguf(source: Config) -> Formats:
    return Formats("gguf", Gguf(8, None, "gguf"), tied=bool(source.get("tied")))


READERS: dict[str, Callable[[Config], Formats]] = {
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "gguf": _gguf,
}
"""What reads the configuration of each ``quant_method``."""

"""Checkpoints in 4 bits to measure with: an AWQ copy of a model, and GPTQ's format of random codes.

AWQ's format is that of AutoAWQ (Lin et al., "AWQ: Activation-aware Weight Quantization", MLSys
2024): a scale and a zero point for each group of inputs. Each weight is rounded to the nearest code
and not scaled by activations first, so answers are a little worse than those of a real AWQ model;
the work is the same.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayfin.actors.errors import InvalidConfig

GROUPS = (128, 64, 32)
GROUP = 128  # of GPTQ
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight codes of a row in a word
LINEAR = re.compile(r"\.layers\.\d+\..*proj\.weight$")


def write_awq(source: Path, target: Path) -> None:
    """Writes the folder ``target``: ``source`` with the layers' projections in AWQ's 4 bits.

    Raises:
        InvalidConfig: ``source`` is quantized, has no safetensors, or sizes that have no group.
    """
    try:
        config = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{source}/config.json: {error}", "awq") from None
    files = sorted(source.glob("*.safetensors"))
    if "quantization_config" in config or not files:
        problem = "is quantized already" if files else "has no safetensors"
        raise InvalidConfig(f"awq needs a plain checkpoint: {source} {problem}", "awq")
    shutil.copytree(
        source, target, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True
    )
    shards = {file.name: load_file(file) for file in files}
    layers = [
        tensor
        for tensors in shards.values()
        for name, tensor in tensors.items()
        if LINEAR.search(name)
    ]
    group = next(
        (
            size
            for size in GROUPS
            if all(layer.shape[1] % size == 0 and layer.shape[0] % 8 == 0 for layer in layers)
        ),
        None,
    )
    if group is None or not layers:
        raise InvalidConfig(
            f"awq needs projections whose inputs are a multiple of {GROUPS[-1]} and outputs of 8",
            "awq",
        )
    places: dict[str, str] = {}
    for file, tensors in shards.items():
        for name in [name for name in tensors if LINEAR.search(name)]:
            codes = quantised(tensors.pop(name), group)
            tensors |= {name.removesuffix("weight") + leaf: part for leaf, part in codes.items()}
        save_file(tensors, target / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": places}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config["quantization_config"] = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
    }
    (target / "config.json").write_text(json.dumps(config))


def quantised(weight: Tensor, group: int) -> dict[str, Tensor]:
    """A weight [N, K] as qweight [K, N / 8], qzeros [K / group, N / 8], scales [K / group, N]."""
    grouped = weight.float().reshape(len(weight), -1, group)
    low = grouped.amin(2).clamp(max=0)
    high = grouped.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (grouped / scales.float()[:, :, None]).round() + zeros[:, :, None]
    return {
        "qweight": _packed(codes.clamp(0, 15).flatten(1).T.to(torch.int64)),
        "qzeros": _packed(zeros.T.to(torch.int64)),
        "scales": scales.T.contiguous(),
    }


def _packed(codes: Tensor) -> Tensor:
    """Codes [R, C] int64 as words [R, C / 8] int32."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for value, place in enumerate(PLACES):
        words |= codes[:, value::8] << 4 * place
    return torch.where(words >= 2**31, words - 2**32, words).int()


def is_layer(name: str) -> bool:
    """Whether a tensor is the weight of a projection, of Mixtral's experts too."""
    ends = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    return ".layers." in name and name.endswith(ends)


def quantise(folder: Path) -> None:
    """Replaces the layers' weights in ``folder`` by 4-bit codes of about the same size."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in filter(is_layer, list(tensors)):
        outputs, inputs = tensors.pop(name).shape
        groups = -(-inputs // GROUP)
        words = torch.randint(-(2**31), 2**31, (inputs // 8, outputs), dtype=torch.int64).int()
        layer = {
            "qweight": words,
            "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
            "scales": torch.full((groups, outputs), 0.004, dtype=torch.float16),
            "g_idx": (torch.arange(inputs) // GROUP).int(),
        }
        tensors |= {name.removesuffix("weight") + leaf: value for leaf, value in layer.items()}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    config["quantization_config"] = {"quant_method": "gptq", **settings}
    (folder / "config.json").write_text(json.dumps(config))

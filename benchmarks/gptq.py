"""A model's linear layers in GPTQ's format, of random codes: a checkpoint to measure with."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 128


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
    own = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    config["quantization_config"] = {"quant_method": "gptq", **own}
    (folder / "config.json").write_text(json.dumps(config))

"""LoRA adapters of the served model, with random weights, as peft writes them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

RANKS = (4, 8, 16)


def make(model: str, folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Saves an adapter for each name; returns their folders."""
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    head = shape.get_output_embeddings()
    linears = {
        path: module
        for path, module in shape.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    folders = {}
    for number, name in enumerate(names):
        rank = RANKS[number % len(RANKS)]
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for path, linear in linears.items():
            for letter, size in (
                ("A", (rank, linear.in_features)),
                ("B", (linear.out_features, rank)),
            ):
                values = torch.randn(*size, generator=generator) / linear.in_features**0.5
                tensors[f"base_model.model.{path}.lora_{letter}.weight"] = values
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        save_file(tensors, target / "adapter_model.safetensors")
        modules = sorted({path.rpartition(".")[2] for path in linears})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        (target / "adapter_config.json").write_text(json.dumps(config))
        folders[name] = str(target)
    return folders

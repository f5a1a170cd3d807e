"""LoRA adapters that peft itself writes, for the tiny models, and what peft generates with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rayfin.actors.adapters.files import read_folder
from rayfin.actors.adapters.part import AdapterRef

KINDS: dict[str, dict[str, Any]] = {
    "small": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
    "rslora": {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
    "mixed": {
        "r": 3,
        "lora_alpha": 9,
        "target_modules": "all-linear",
        "rank_pattern": {r"layers.1.self_attn.q_proj": 7},
        "alpha_pattern": {"down_proj": 20},
    },
}


def make_adapter(model: Path | str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes an adapter with random A and B; its tokens differ from the base model's."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(seed)
    config = LoraConfig(**{**KINDS["small"], "init_lora_weights": False, **changes})
    adapted = get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    return folder


def generate(model: Path | str, adapter: Path | None, prompt: Sequence[int], n: int) -> list[int]:
    """The greedy tokens of transformers' model with peft's adapter, or of the base model."""
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        base = PeftModel.from_pretrained(base, adapter)
    out = base.generate(
        input_ids=torch.tensor([list(prompt)]), max_new_tokens=n, do_sample=False, eos_token_id=-1
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def ref_of(folder: Path, name: str = "an adapter") -> AdapterRef:
    return AdapterRef(read_folder(str(folder)).digest, name, str(folder))

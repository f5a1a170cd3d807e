"""An AWQ copy holds the model's weights, up to half a step of their codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import PLACES, quantised, write_awq
from safetensors.torch import load_file

from rayfin.actors.errors import InvalidConfig


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """[R, C / 8] int32 -> codes [R, C]."""
    wide = words.to(torch.int64) & 0xFFFFFFFF
    return torch.stack([wide >> 4 * place & 15 for place in PLACES], 2).flatten(1)


@pytest.mark.parametrize("group", [32, 64])
def test_weights_are_within_a_step(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    weight = torch.randn(24, 128, generator=generator)
    weight[3] = weight[3].abs()  # a group without negative weights
    weight[4] = 0
    made = quantised(weight, group)
    assert made["qweight"].shape == (128, 3) and made["qweight"].dtype == torch.int32
    assert made["qzeros"].shape == (128 // group, 3) and made["scales"].dtype == torch.float16
    scales = made["scales"].float().repeat_interleave(group, 0)
    zeros = unpacked(made["qzeros"]).repeat_interleave(group, 0)
    read = ((unpacked(made["qweight"]) - zeros) * scales).T
    # half a step of rounding, and half of one where the zero point was rounded
    assert (read - weight).abs().le(scales.T * 1.02).all()
    assert read[4].abs().max() == 0


def test_a_copy_has_everything_else(tmp_path: Path, tiny_models: Any) -> None:
    plain, copy = tmp_path / "plain", tmp_path / "awq"
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    tiny_models.make_tiny_model("llama", plain, **sizes)
    (plain / "tokenizer.json").write_text("{}")
    write_awq(plain, copy)
    before, after = (load_file(folder / "model.safetensors") for folder in (plain, copy))
    linear = {name for name in before if name.endswith("proj.weight")}
    kept = set(before) - linear
    assert linear and all(torch.equal(before[name], after[name]) for name in kept)
    stems = {name.removesuffix("weight") for name in linear}
    assert set(after) - kept == {
        s + leaf for s in stems for leaf in ("qweight", "qzeros", "scales")
    }
    config = json.loads((copy / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == 32
    assert (copy / "tokenizer.json").exists()
    with pytest.raises(InvalidConfig, match="quantized already"):
        write_awq(copy, tmp_path / "again")


def test_models_without_a_group(tmp_path: Path, tiny_models: Any) -> None:
    tiny_models.make_tiny_model("llama", tmp_path / "plain", intermediate_size=40)
    with pytest.raises(InvalidConfig, match="multiple of 32"):
        write_awq(tmp_path / "plain", tmp_path / "awq")
    with pytest.raises(InvalidConfig, match=r"config\.json"):
        write_awq(tmp_path / "none", tmp_path / "awq")

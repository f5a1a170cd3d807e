"""Adapters that are refused, each with an error that names the file and the key."""

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from rayfin.actors.adapters.files import MAX_WEIGHT_BYTES, read_folder
from rayfin.actors.adapters.settings import IGNORED, PLAIN, READ, read_settings
from rayfin.actors.adapters.tensors import read_pairs
from rayfin.actors.errors import InvalidRequest, NotFound
from rayfin.actors.runner.parts.lora.reader import read_adapter

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}
NAME = "base_model.model.layers.0.q.lora_{}.weight"
SIZES = {"layers.0.q": (4, 6)}


def tensors() -> dict[str, torch.Tensor]:
    return {NAME.format("A"): torch.ones(2, 4), NAME.format("B"): torch.ones(6, 2)}


def write(
    folder: Path, config: Any = CONFIG, weights: bytes | dict[str, torch.Tensor] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "adapter_config.json").write_text(text)
    data = tensors() if weights is None else weights
    content = data if isinstance(data, bytes) else save(data)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def read(folder: Path) -> Any:
    files = read_folder(str(folder))
    return read_adapter(files, SIZES, 8, torch.float32, torch.device("cpu"))


def header(length: int, text: bytes = b"{}") -> bytes:
    return length.to_bytes(8, "little") + text


def test_a_good_one(tmp_path: Path) -> None:
    adapter = read(write(tmp_path / "a"))
    low_rank = adapter.layers["layers.0.q"]
    assert low_rank.scale == 2.0
    assert torch.equal(low_rank.delta(torch.ones(1, 4)), torch.full((1, 6), 16.0))


CONFIGS: dict[str, tuple[Any, str]] = {
    "no json": ("{", "not valid JSON"),
    "a list": ([], "must hold an object"),
    "another method": ({**CONFIG, "peft_type": "IA3"}, "peft_type"),
    "rank 0": ({**CONFIG, "r": 0}, "r is '0'"),
    "rank of text": ({**CONFIG, "r": "8"}, "r is '8'"),
    "rank over the limit": ({**CONFIG, "r": 9}, r"--max-lora-rank \(8\)"),
    "rank over the limit in a pattern": ({**CONFIG, "rank_pattern": {"q": 99}}, "rank_pattern"),
    "alpha is infinite": ('{"peft_type": "LORA", "lora_alpha": Infinity}', "lora_alpha"),
    "dora": ({**CONFIG, "use_dora": True}, "use_dora"),
    "modules to save": ({**CONFIG, "modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({**CONFIG, "bias": "all"}, "bias"),
    "lora bias": ({**CONFIG, "lora_bias": True}, "lora_bias"),
    "alora": ({**CONFIG, "alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "pissa": ({**CONFIG, "init_lora_weights": "pissa"}, "init_lora_weights"),
    "loftq": ({**CONFIG, "init_lora_weights": "loftq"}, "init_lora_weights"),
    "replicated layers": ({**CONFIG, "layer_replication": [[0, 1]]}, "layer_replication"),
    "a field of tomorrow": ({**CONFIG, "use_magic": 1}, "use_magic"),
    "a pattern that is none": ({**CONFIG, "alpha_pattern": {"(": 1}}, "alpha_pattern"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_are_refused(case: str, tmp_path: Path) -> None:
    config, match = CONFIGS[case]
    with pytest.raises(InvalidRequest, match=match) as caught:
        read(write(tmp_path / "a", config))
    assert caught.value.code == "invalid_adapter"


WEIGHTS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "truncated"),
    "a header of 10 GB": (header(10 * 2**30), "truncated"),
    "no header": (header(4, b"abcd"), "header cannot be read"),
    "truncated": (lambda: save(tensors())[:-8], "does not lie within"),
    "no tensors": ({}, "no tensors"),
    "no B": (lambda: {NAME.format("A"): torch.ones(2, 4)}, "has no lora_B"),
    "another rank": (
        lambda: {NAME.format("A"): torch.ones(3, 4), NAME.format("B"): torch.ones(6, 3)},
        "its rank is 2",
    ),
    "other inputs": (lambda: {**tensors(), NAME.format("A"): torch.ones(2, 5)}, "for 5 inputs"),
    "another module": (
        lambda: {name.replace("q", "z"): own for name, own in tensors().items()},
        "no linear layer 'layers.0.z'",
    ),
    "an embedding": (lambda: {"model.lora_embedding_A": torch.ones(2, 4)}, "no A or B"),
    "integers": (lambda: {**tensors(), NAME.format("A"): torch.ones(2, 4).int()}, "type I32"),
    "nan": (
        lambda: {**tensors(), NAME.format("B"): torch.full((6, 2), float("nan"))},
        "not finite",
    ),
    "a vector": (lambda: {**tensors(), NAME.format("A"): torch.ones(4)}, "1 dimensions"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_refused(case: str, tmp_path: Path) -> None:
    weights, match = WEIGHTS[case]
    made = weights() if isinstance(weights, Callable) else weights  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=match) as caught:
        read(write(tmp_path / "a", CONFIG, made))
    assert caught.value.code == "invalid_adapter"


def test_folders_that_are_refused(tmp_path: Path) -> None:
    for path in (str(tmp_path / "none"), str(tmp_path), "a\0b"):
        with pytest.raises((NotFound, InvalidRequest)):
            read_folder(path)
    folder = write(tmp_path / "pickled")
    os.rename(folder / "adapter_model.safetensors", folder / "adapter_model.bin")
    with pytest.raises(InvalidRequest, match="can run code"):
        read_folder(str(folder))


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first = read_folder(str(write(tmp_path / "a"))).digest
    turned = dict(reversed(CONFIG.items()))
    assert read_folder(str(write(tmp_path / "b", turned))).digest == first
    assert read_folder(str(write(tmp_path / "c", {**CONFIG, "lora_alpha": 8}))).digest != first
    other = {name: own * 2 for name, own in tensors().items()}
    assert read_folder(str(write(tmp_path / "d", CONFIG, other))).digest != first


def test_patterns_follow_pefts_rule() -> None:
    settings = read_settings(
        {**CONFIG, "rank_pattern": {"q_proj": 4, "layers.1.v": 3}, "alpha_pattern": {"v": 6}}, 8
    )
    paths = ("layers.0.q_proj", "q_proj", "layers.0.xq_proj", "layers.1.v", "layers.11.v")
    assert [settings.rank(path) for path in paths] == [4, 4, 2, 3, 2]
    assert settings.scale("layers.1.v") == 6 / 3 and settings.scale("layers.0.q_proj") == 1.0


def test_every_field_of_peft_is_known() -> None:
    """A new field of peft's is refused until somebody has looked at it."""
    from peft import LoraConfig

    names = {field.name for field in fields(LoraConfig)}
    assert names <= IGNORED | PLAIN.keys() | READ, names - (IGNORED | PLAIN.keys() | READ)


def test_pairs_of_a_file(tmp_path: Path) -> None:
    files = read_folder(str(write(tmp_path / "a")))
    pairs = read_pairs(files, read_settings(files.config, 8))
    assert {path: (own.rank, own.inputs, own.outputs) for path, own in pairs.items()} == {
        "layers.0.q": (2, 4, 6)
    }


def test_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two files are fetched; a folder of that name goes first, and other paths are no names."""
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], dry_run: bool = False) -> Any:
        assert allow_patterns == ["adapter_config.json", "adapter_model.safetensors"]
        if dry_run:
            size = MAX_WEIGHT_BYTES + (name == "org/large")
            return [SimpleNamespace(filename=allow_patterns[1], file_size=size)]
        asked.append(name)
        if name != "org/good":
            raise OSError("no such repository")
        return str(write(tmp_path / "cache"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    digest = read_folder("org/good").digest
    assert read_folder(str(tmp_path / "cache")).digest == digest
    for path in ("org/none", "/org/good", "../good", "org/good/more", "org", "org/..", "-o/a"):
        with pytest.raises(NotFound, match="no such folder"):
            read_folder(path)
    assert asked == ["org/good", "org/none"]
    with pytest.raises(InvalidRequest, match="at most"):
        read_folder("org/large")
    assert asked == ["org/good", "org/none"], "it was fetched"
    other = write(tmp_path / "org", CONFIG)
    write(other / "good", {**CONFIG, "lora_alpha": 8})
    assert read_folder("org/good").digest != digest and len(asked) == 2

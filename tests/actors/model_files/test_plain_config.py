"""A model that plain JSON takes for a decoder of text is one for transformers too."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rayfin.actors.config import EngineArgs
from rayfin.actors.images.processor import model_reads_images
from rayfin.actors.model_files.plain_config import DECODERS, is_known_decoder
from rayfin.actors.runner.models.config import load_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
}


def folder_of(config: Any, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_known_families_are_decoders_of_text(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind)
    assert not config.is_encoder_decoder
    held = {"model_type": kind, "architectures": ["AnyForCausalLM"]}
    args = EngineArgs(model=folder_of(held, tmp_path))
    assert is_known_decoder(args)
    assert not model_reads_images(args)
    load_config(args)  # refuses what is no decoder
    asked = EngineArgs(model=args.model, hf_overrides={"use_cache": True})
    assert not is_known_decoder(asked)
    assert not model_reads_images(asked)  # as transformers has it


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "t5"},
        {"model_type": None},
        {"architectures": None},
        {"architectures": ["LlamaModel"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"auto_map": {"AutoConfig": "own.Config"}},
        {"is_encoder_decoder": True},
        {"hidden_size": 0},
        {"hidden_size": "32"},
        {"vocab_size": 1.5},
    ],
)
def test_anything_unusual_is_asked_of_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    assert is_known_decoder(EngineArgs(model=folder_of(LLAMA, tmp_path)))
    assert not is_known_decoder(EngineArgs(model=folder_of(LLAMA | change, tmp_path)))


def test_files_that_say_nothing(tmp_path: Path) -> None:
    assert not is_known_decoder(EngineArgs(model=str(tmp_path)))
    assert not is_known_decoder(EngineArgs(model=folder_of(["llama"], tmp_path)))
    (tmp_path / "config.json").write_text("{")
    assert not is_known_decoder(EngineArgs(model=str(tmp_path)))


def test_code_of_the_models_own_is_asked(tmp_path: Path) -> None:
    folder = folder_of(LLAMA, tmp_path)
    assert not is_known_decoder(EngineArgs(model=folder, trust_remote_code=True))

"""A model that plain JSON takes for a decoder of text is one for transformers too."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.media.kinds import model_media
from rayfin.actors.model_files.files import find_file
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
    assert not model_media(args)
    load_config(args)  # refuses what is no decoder
    asked = EngineArgs(model=args.model, hf_overrides={"use_cache": True})
    assert not is_known_decoder(asked)
    assert not model_media(asked)  # as transformers has it


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
        {"rms_norm_eps": "1e-6"},
        {"rope_theta": [10000]},
        {"rope_parameters": {"rope_theta": "10000"}},
        {"num_attention_heads": 5},
        {"num_hidden_layers": 2, "layer_types": ["full_attention"]},
        {"layer_types": "full_attention"},
    ],
)
def test_anything_unusual_is_asked_of_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    assert is_known_decoder(EngineArgs(model=folder_of(LLAMA, tmp_path)))
    assert not is_known_decoder(EngineArgs(model=folder_of(LLAMA | change, tmp_path)))


def test_what_fits_is_known(tmp_path: Path) -> None:
    more = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "rms_norm_eps": 1e-6}
    for heads in ({"num_attention_heads": 4}, {"num_attention_heads": 5, "head_dim": 8}):
        held = LLAMA | more | heads | {"rope_parameters": {"rope_theta": 1e4}}
        assert is_known_decoder(EngineArgs(model=folder_of(held, tmp_path)))


def test_values_of_a_wrong_kind_are_refused_in_a_line(tmp_path: Path) -> None:
    args = EngineArgs(model=folder_of(LLAMA | {"rms_norm_eps": "small"}, tmp_path))
    with pytest.raises(InvalidConfig, match="config.json: .*rms_norm_eps") as error:
        load_config(args)
    assert "\n" not in str(error.value)


def test_the_hub_is_asked_once_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(model: str, name: str, **hub: Any) -> str | None:
        asked.append(name)
        return str(tmp_path / name) if len(asked) > 1 else None

    monkeypatch.setattr("transformers.utils.hub.cached_file", ask)
    folder_of(LLAMA, tmp_path)
    hub = {"revision": None, "cache_dir": str(tmp_path)}
    assert find_file("org/none", "config.json", **hub) is None
    for _ in range(3):  # what was not there is asked for again
        assert find_file("org/none", "config.json", **hub) == tmp_path / "config.json"
    assert len(asked) == 2
    find_file("org/none", "config.json", **hub | {"revision": "other"})
    assert len(asked) == 3


def test_files_that_say_nothing(tmp_path: Path) -> None:
    assert not is_known_decoder(EngineArgs(model=str(tmp_path)))
    assert not is_known_decoder(EngineArgs(model=folder_of(["llama"], tmp_path)))
    (tmp_path / "config.json").write_text("{")
    assert not is_known_decoder(EngineArgs(model=str(tmp_path)))


def test_code_of_the_models_own_is_asked(tmp_path: Path) -> None:
    folder = folder_of(LLAMA, tmp_path)
    assert not is_known_decoder(EngineArgs(model=folder, trust_remote_code=True))

"""Bad models are refused before anything starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.preflight import (
    InBackground,
    check_model,
    require_files,
    require_room,
)
from rayfin.deployments.serve.server_args import ServerArgs

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All that a served model has, but an empty file for weights."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, "a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="b").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_served_model_passes(folder: Path) -> None:
    check_model(EngineArgs(model=str(folder)))
    check_model(EngineArgs(model="demo"))


def test_dummy_weights_need_no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    check_model(EngineArgs(model=str(folder), load_format="dummy"))


def test_tokenizer_may_live_elsewhere(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(other / name)
    check_model(EngineArgs(model=str(other), tokenizer=str(folder)))
    with pytest.raises(InvalidConfig, match="tokenizer"):
        check_model(EngineArgs(model=str(other)))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", '{"model_type": "no-such-model"}', "no-such-model"),
        ("model.safetensors", None, "no .safetensors file"),
        ("tokenizer.json", None, "tokenizer"),
        ("tokenizer.json", "{", "tokenizer"),
    ],
)
def test_broken_folder(folder: Path, file: str, text: str | None, message: str) -> None:
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(InvalidConfig, match=message) as error:
        check_model(EngineArgs(model=str(folder)))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_draft_model_is_looked_at_too(folder: Path) -> None:
    check_model(EngineArgs(model=str(folder), spec_model=str(folder)))
    with pytest.raises(InvalidConfig, match="speculative_config model: there is no folder") as got:
        check_model(EngineArgs(model=str(folder), spec_model=str(folder / "none")))
    assert got.value.param == "speculative_config"


def test_the_head_is_looked_at_too(folder: Path, tmp_path: Path) -> None:
    args = EngineArgs(model=str(folder), spec_method="eagle3", spec_model=str(folder))
    with pytest.raises(InvalidConfig, match="not an EAGLE-3 head") as got:
        check_model(args)
    assert got.value.param == "speculative_config"


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=f"there is no folder {tmp_path}/none"):
        check_model(EngineArgs(model=f"{tmp_path}/none"))


def test_architecture_that_is_not_served(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        check_model(EngineArgs(model=str(folder)))


@pytest.mark.parametrize(
    ("server", "engine", "runners"),
    [
        ({}, {}, 1),
        ({"data_parallel_size": 3}, {}, 3),
        ({"min_engines": 0, "max_engines": 9}, {}, 0),
        ({"min_engines": 2, "max_engines": 9}, {"pipeline_parallel_size": 2}, 4),
        ({}, {"tensor_parallel_size": 3, "pipeline_parallel_size": 2}, 6),
    ],
)
def test_room_for_runners(server: dict[str, Any], engine: dict[str, Any], runners: int) -> None:
    model = ModelArgs(ServerArgs(**server), EngineArgs(**engine))
    require_room([model, model], 2 * runners)
    if runners:
        with pytest.raises(InvalidConfig, match=f"^{2 * runners} runners need a core each"):
            require_room([model, model], 2 * runners - 1)


def test_what_files_say_is_said_at_once(folder: Path) -> None:
    require_files(EngineArgs(model=str(folder)))
    require_files(EngineArgs(model="demo"))
    require_files(EngineArgs(model="org/on-the-hub"))
    with pytest.raises(InvalidConfig, match="there is no folder ./none"):
        require_files(EngineArgs(model="./none"))
    (folder / "model.safetensors").unlink()
    require_files(EngineArgs(model=str(folder), load_format="dummy"))
    with pytest.raises(InvalidConfig, match="holds no .safetensors file"):
        require_files(EngineArgs(model=str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(InvalidConfig, match="holds no config.json"):
        require_files(EngineArgs(model=str(folder)))


def test_checks_in_the_background_say_what_they_find() -> None:
    InBackground(lambda: None).result()

    def fails() -> None:
        raise InvalidConfig("planted", "model")

    with pytest.raises(InvalidConfig, match="planted"):
        InBackground(fails).result()


def test_a_server_starts_without_torch() -> None:
    """The command's process, which starts Ray and Serve, imports neither torch nor transformers."""
    script = "import sys, rayfin.deployments.serve.serving; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers"} & set(done.stdout.split())

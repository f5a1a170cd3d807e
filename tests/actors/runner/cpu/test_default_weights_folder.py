"""Packed weights are kept by default, of small models and where there is room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayfin.actors.runner.cpu import decoder_cache
from rayfin.actors.runner.cpu.decoder_cache import DecoderCache

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RAYFIN_WEIGHTS_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def place(args: Any) -> DecoderCache | None:
    return DecoderCache.of(args, torch.device("cpu"), {})


def test_a_folder_is_named_or_the_users_own(
    home: Path, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_args("m").weights_folder == home / ".cache/rayfin/weights"
    assert engine_args("m", weights_cache="~/w").weights_folder == home / "w"
    assert engine_args("m", weights_cache="off").weights_folder is None
    monkeypatch.setenv("RAYFIN_WEIGHTS_CACHE", "/there")
    assert engine_args("m").weights_folder == Path("/there")
    monkeypatch.setenv("RAYFIN_WEIGHTS_CACHE", "off")
    assert engine_args("m").weights_folder is None


def test_small_models_have_a_place_unasked(model: Path, engine_args: Make) -> None:
    assert place(engine_args(model)) is not None
    assert place(engine_args(model, weights_cache="off")) is None


@pytest.mark.parametrize("bound", ["UNASKED_MODEL", "_room", "tempfile.tempdir"])
def test_others_have_one_if_it_is_named(
    bound: str, model: Path, engine_args: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bound == "tempfile.tempdir":
        monkeypatch.setattr(bound, str(tmp_path))
    else:
        monkeypatch.setattr(decoder_cache, bound, 0 if bound != "_room" else lambda folder: 0)
    assert place(engine_args(model)) is None
    assert place(engine_args(model, weights_cache=str(tmp_path / "named"))) is not None


def test_what_cannot_be_written_has_no_room(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decoder_cache._room(home / ".cache/rayfin/weights") > 0
    monkeypatch.setattr("os.access", lambda *args: False)
    assert decoder_cache._room(home) == 0

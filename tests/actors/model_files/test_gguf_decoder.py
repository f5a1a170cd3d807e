"""A plain decoder's folder is the one of transformers' reading, and is made without torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig

from rayfin.actors.model_files.gguf_decoder import convert_plain, is_plain
from rayfin.actors.model_files.gguf_header import read_header

pytest.importorskip("gguf")

import gguf_files
from gguf_files import make_folder, mixed, write_gguf


def split(name: str) -> str:
    return "q5_1" if "attn" in name else "iq4_xs"


@pytest.mark.parametrize(
    "family, kind, tied",
    [
        ("llama", "q4_0", True),
        ("llama", mixed, False),
        ("llama", split, True),
        ("qwen3", mixed, True),
        ("qwen3", "q2_k", False),
    ],
)
def test_the_same_folder(family: str, kind: Any, tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind, family, tied=tied)
    folder, whole = tmp_path / "plain", tmp_path / "whole"
    folder.mkdir()
    assert convert_plain([str(path)], str(folder))
    make_folder([path], whole)
    found, expected = (load_file(one / "model.safetensors") for one in (folder, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    for kind_of in (AutoConfig, GenerationConfig):
        known, wanted = (kind_of.from_pretrained(one).to_dict() for one in (folder, whole))
        unsaid = {"_name_or_path", "_model_name_or_path"}
        for name in {*known, *wanted} - unsaid:
            assert known.get(name) == wanted.get(name) or known.get(name) is None, name
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_text() == (whole / name).read_text()


@pytest.mark.parametrize(
    "family, kind, more",
    [
        ("llama", "f16", {}),
        ("llama", "q4_0", {"fields": {"rope.scaling.type": "linear"}}),
        ("llama", "q4_0", {"extra": {"rope_freqs.weight": [1.0] * 32}}),
        ("llama", "q4_0", {"fields": {"expert_count": 4}}),
        ("qwen2", "q4_0", {}),
        ("qwen3moe", "q4_0", {}),
        ("gemma3", "q4_0", {}),
    ],
)
def test_others_are_left(family: str, kind: str, more: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind, family, **more)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert not convert_plain([str(path)], str(folder)) and not list(folder.iterdir())


def test_positions_without_a_base_are_left(tmp_path: Path) -> None:
    """transformers' configurations have one of their own."""
    header = read_header(write_gguf(tmp_path / "tiny.gguf", "q4_0"))
    assert is_plain(header)
    del header.fields["llama.rope.freq_base"]
    assert not is_plain(header)


def test_a_broken_tokenizer_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other reading goes on without one, for --tokenizer may name another."""
    tokens = ["xy" if token == "ab" else token for token in gguf_files.TOKENS]
    monkeypatch.setattr(gguf_files, "TOKENS", tokens)  # its merge makes no token
    path = write_gguf(tmp_path / "tiny.gguf", "q4_0")
    folder, whole = tmp_path / "folder", tmp_path / "whole"
    folder.mkdir()
    assert not convert_plain([str(path)], str(folder)) and not list(folder.iterdir())
    make_folder([path], whole)
    assert (whole / "model.safetensors").is_file() and not (whole / "tokenizer.json").exists()


def test_it_imports_no_torch(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "q4_0")
    (tmp_path / "folder").mkdir()
    script = (
        "import sys\nfrom rayfin.actors.model_files.gguf_decoder import convert_plain\n"
        f"assert convert_plain([{str(path)!r}], {str(tmp_path / 'folder')!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "cut.gguf", "q4_0")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="it ends before its tensor"):
        convert_plain([str(path)], str(tmp_path))

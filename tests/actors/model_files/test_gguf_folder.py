"""A GGUF file is served with the tokens of transformers' own reading of it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files import gguf_folder as module
from rayfin.actors.model_files.gguf_folder import gguf_folder, is_gguf

pytest.importorskip("gguf")

from gguf_files import make_folder, write_gguf


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.CACHE, str(tmp_path / "cache"))


@pytest.fixture
def made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converts in this process."""
    monkeypatch.setattr(module, "_make", make_folder)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / f"tiny.{kind}.gguf", kind)
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    model.is_quantized, model.generation_config.eos_token_id = False, None
    prompts = [[72, 101, 108], list(range(40, 70))]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(path), kv_cache_memory=2**22, max_model_len=128, threads=1) as llm:
        said = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        text = llm.generate("Hello", params, use_tqdm=False)[0]
        chat: Any = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
    for prompt, answer in zip(prompts, said, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert list(answer.outputs[0].token_ids) == expected[0, len(prompt) :].tolist()
    assert text.outputs[0].text
    assert chat[0].outputs[0].text == text.outputs[0].text  # by the file's own template


def test_it_is_made_once(made_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "f32")
    folder = gguf_folder(str(path))
    assert (folder / "config.json").is_file()

    def never(*_: Any) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr(module, "_make", never)
    assert gguf_folder(str(path)) == folder
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(AssertionError):
        gguf_folder(str(path))  # another file


def test_names_on_the_hub(made_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["README.md", "tiny-Q8_0.gguf", "tiny-F32.gguf"]
    path, asked = write_gguf(tmp_path / "tiny-F32.gguf", "f32"), []

    def download(repository: str, file: str, *, revision: Any, cache_dir: Any) -> str:
        asked.append((repository, file, revision, cache_dir))
        return str(path)

    module._fetch.cache_clear()
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repository, revision: files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    folder = gguf_folder("owner/tiny-GGUF:f32")
    assert folder == gguf_folder("owner/tiny-GGUF/tiny-F32.gguf") == gguf_folder(str(path))
    assert folder == gguf_folder("owner/tiny-GGUF:f32")
    file = ("owner/tiny-GGUF", "tiny-F32.gguf")
    assert asked == [(*file, None, None)] * 2  # each name once in a process
    assert gguf_folder("owner/tiny-GGUF:f32", revision="v2", cache_dir="/x") == folder
    assert asked[-1] == (*file, "v2", "/x")
    with pytest.raises(InvalidConfig, match=r"no GGUF file of Q4_K_M; it has tiny-Q8_0\.gguf, "):
        gguf_folder("owner/tiny-GGUF:Q4_K_M")
    module._fetch.cache_clear()


def test_a_model_in_parts(made_here: None, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "parts.gguf", "q4_0", parts=3)
    whole = gguf_folder(str(write_gguf(tmp_path / "whole.gguf", "q4_0")))
    second = tmp_path / "parts-00002-of-00003.gguf"
    folder = gguf_folder(str(first))
    assert gguf_folder(str(second)) == folder
    found, expected = (load_file(one / "model.safetensors") for one in (folder, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(own, expected[name]) for name, own in found.items())
    second.unlink()
    with pytest.raises(InvalidConfig, match=r"no file parts-00002-of-00003\.gguf, a part of"):
        gguf_folder(str(first))


def test_parts_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [f"big/parts-Q4_0-0000{number}-of-00002.gguf" for number in (2, 1)]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repository, revision: files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, file, **_: file)
    module._fetch.cache_clear()
    for name in ("owner/big:q4_0", f"owner/model/{files[0]}"):
        assert [str(own) for own in module._fetch(name, None, None)] == sorted(files)
    module._fetch.cache_clear()


def test_errors_name_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_gguf("owner/name/file.Q4_K_M.gguf") and is_gguf("owner/name-GGUF:Q4_K_M")
    (tmp_path / "a.gguf").mkdir()
    assert not is_gguf(str(tmp_path / "a.gguf"))  # a folder is one
    assert not is_gguf("owner/name") and not is_gguf("demo") and not is_gguf("/models/x")
    with pytest.raises(InvalidConfig, match=r"there is no file .*none\.gguf"):
        gguf_folder(str(tmp_path / "none.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says")
    with pytest.raises(InvalidConfig, match=r"broken\.gguf cannot be read"):
        gguf_folder(str(broken))
    assert not [own for own in (tmp_path / "cache").iterdir() if own.is_dir()]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"rayfin\[gguf\]"):
        gguf_folder(str(broken))


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    cut = write_gguf(tmp_path / "cut.gguf", "q4_0")
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    with pytest.raises(InvalidConfig, match=r"cut\.gguf cannot be read: [^\n]+$"):
        gguf_folder(str(cut))
    assert not [own for own in (tmp_path / "cache").iterdir() if own.is_dir()]


def test_what_a_killed_conversion_left(made_here: None, tmp_path: Path) -> None:
    folder = gguf_folder(str(write_gguf(tmp_path / "tiny.gguf", "f32")))
    left, other = (folder.with_name(f"{name}.abcd") for name in (folder.name, "other"))
    other.mkdir()
    folder.rename(left)
    assert gguf_folder(str(tmp_path / "tiny.gguf")) == folder
    assert folder.is_dir() and other.is_dir() and not left.exists()


def test_parts_in_upper_case() -> None:
    names = [f"A-0000{number}-of-00002.GGUF" for number in (1, 2)]
    assert module._parts(names[1], names) == names

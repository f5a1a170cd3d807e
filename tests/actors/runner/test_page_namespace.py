"""Pages on a disk are named by what the model's files hold, not by their places and times."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.digests import tensors_digest
from rayfin.actors.model_files.shards import INDEX, SINGLE
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.page_namespace import PageNaming, page_namespace

Make = Callable[..., Any]
PROMPT = [3 + 7 * i % 100 for i in range(160)]  # longer than what is not worth a file


@pytest.fixture
def copy(tiny_model: Make, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama").folder, tmp_path / "copy"))


def change_weights(folder: Path) -> None:
    """Other weights in a file of the same name, size and times."""
    path = folder / SINGLE
    before = path.stat()
    tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_pages_of_other_weights_are_not_read(copy: Path, tmp_path: Path) -> None:
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "num_pages": 64, "page_size": 16}

    def answer(**more: Any) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0, max_tokens=8)
        with LLM(str(copy), **settings, **more) as llm:
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        return output.outputs[0].token_ids, output.num_cached_tokens or 0

    disk = {"kv_disk_path": str(tmp_path / "pages")}
    old, _ = answer(**disk)
    again, cached = answer(**disk)
    assert again == old and cached > 0
    change_weights(copy)
    expected, _ = answer()
    assert expected != old
    assert answer(**disk) == (expected, 0)


def test_the_name_follows_the_content(copy: Path, tmp_path: Path, engine_args: Make) -> None:
    def name(folder: Path, **settings: Any) -> str:
        args = engine_args(folder, kv_disk_path=str(tmp_path / "pages"), **settings)
        namespace: str = ModelRunner(args).profile()[0].page_namespace
        assert len(namespace) == 24
        return namespace

    first = name(copy)
    elsewhere = Path(shutil.copytree(copy, tmp_path / "elsewhere"))
    tensors = load_file(elsewhere / SINGLE)
    (elsewhere / SINGLE).unlink()
    places = {}
    for number, key in enumerate(sorted(tensors)):
        places[key] = f"part-{number % 2}.safetensors"
    for file in set(places.values()):
        own = {key: tensors[key] for key in places if places[key] == file}
        save_file(own, elsewhere / file, metadata={"format": "pt", "by": "another"})
    (elsewhere / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (elsewhere / "README.md").write_text("a copy")
    assert name(elsewhere) == first, "a copy that is cut otherwise has the same tensors"
    others = {first, name(copy, hf_overrides={"rms_norm_eps": 0.1})}
    others |= {name(copy, page_size=8), name(copy, dtype="bfloat16")}
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    others.add(name(copy))
    change_weights(copy)
    others.add(name(copy))
    assert len(others) == 6


def test_a_model_that_is_written_anew_is_another_one(
    copy: Path, tmp_path: Path, engine_args: Make
) -> None:
    """Engines ask what their pages depend on once there is another engine: the files may be those
    of another model by then, which that one has loaded."""
    args = engine_args(copy)
    loaded = ModelRunner(args).loaded
    before, same = PageNaming(args), PageNaming(args)
    name = before.name(loaded)
    assert name == same.name(loaded) == page_namespace(args, loaded)
    late = PageNaming(args)
    other = {key: tensor.flip(0).contiguous() for key, tensor in load_file(copy / SINGLE).items()}
    save_file(other, copy / "new", metadata={"format": "pt"})
    (copy / "new").rename(copy / SINGLE)
    after = PageNaming(args)
    assert late.name(loaded) != after.name(loaded) == page_namespace(args, loaded) != name
    assert before.name(loaded) == name, "it was read in time"


def test_a_model_without_files_is_like_no_other(engine_args: Make, copy: Path) -> None:
    """Of one that is elsewhere by another name, nothing is known."""
    loaded = ModelRunner(engine_args(copy)).loaded
    nowhere = engine_args(copy / "missing")
    with pytest.raises(InvalidConfig, match="config.json"):
        page_namespace(nowhere, loaded)
    assert PageNaming(nowhere).name(loaded) != PageNaming(nowhere).name(loaded)


def test_the_digest_of_tensors_is_golden(tmp_path: Path) -> None:
    """Engines of all machines and releases have to agree."""
    tensors = {
        "b": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "a": torch.tensor([1.5], dtype=torch.bfloat16),
        "none": torch.empty(0),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    digest = tensors_digest([tmp_path / "x.safetensors"])
    assert digest == "00b21b8edac0d6b4eacb0c91cbe3a5d63b821c4da8e6c900e167f87a47a86762"
    save_file(tensors | {"b": tensors["b"].reshape(3, 2)}, tmp_path / "x.safetensors")
    assert tensors_digest([tmp_path / "x.safetensors"]) != digest

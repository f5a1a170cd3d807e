"""A tensor that several files hold is read from the one that the index names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantised import QuantisedModel
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.shards import INDEX, SINGLE, require_safetensors
from rayfin.actors.runner.parallel.shard_weights import Checkpoint
from rayfin.actors.runner.speculation.head_folder import read_tensors
from rayfin.actors.runner.speculation.mtp import read_weights
from rayfin.kernels.cpu.kernels import try_kernels

Make = Callable[..., Any]
PROMPT, MORE = [3 + 7 * i % 100 for i in range(30)], 8
FIRST, SECOND, WHOLE = (
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    "consolidated.safetensors",
)


def split(folder: Path) -> dict[str, torch.Tensor]:
    """Cuts a checkpoint in two, each with stale copies of the other's, and one more of all."""
    right = load_file(folder / SINGLE)
    stale = {name: tensor.flip(0).contiguous() for name, tensor in right.items()}
    files: dict[str, dict[str, torch.Tensor]] = {FIRST: dict(stale), SECOND: dict(stale)}
    places = {name: (FIRST, SECOND)[number % 2] for number, name in enumerate(sorted(right))}
    for name, file in places.items():
        files[file][name] = right[name]
    for file, tensors in (*files.items(), (WHOLE, stale)):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / SINGLE).unlink()
    return right


@pytest.fixture
def copy(tiny_model: Make, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama").folder, tmp_path / "copy"))


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"weights_cache": "cache"}])
def test_a_stale_copy_is_not_read(
    settings: dict[str, Any],
    copy: Path,
    served: Make,
    request_of: Make,
    tmp_path: Path,
) -> None:
    settings = (
        settings | {"weights_cache": str(tmp_path)} if "weights_cache" in settings else settings
    )
    expected = served(copy, **settings).run(request_of(0, PROMPT, MORE))
    split(copy)
    for _ in range(2):
        assert served(copy, **settings).run(request_of(0, PROMPT, MORE)) == expected


@pytest.mark.skipif(try_kernels(1) is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("settings", [{}, {"quantization": "dequantize"}])
def test_nor_one_of_codes(
    settings: dict[str, Any], served: Make, request_of: Make, tmp_path: Path
) -> None:
    model = QuantisedModel("gptq", "llama", tmp_path)
    expected = served(model.folder, **settings).run(request_of(0, PROMPT, MORE))
    split(model.folder)
    assert served(model.folder, **settings).run(request_of(0, PROMPT, MORE)) == expected


def test_nor_by_a_rank_or_a_head(copy: Path, engine_args: Make) -> None:
    right = load_file(copy / SINGLE)
    head = {"mtp.fc.weight": torch.rand(4, 8), "mtp.norm.weight": torch.rand(4)}
    save_file(right | head, copy / SINGLE, metadata={"format": "pt"})
    right = split(copy)
    checkpoint = Checkpoint.of(engine_args(copy), "model")
    for name, tensor in right.items():
        assert torch.equal(checkpoint.read(name, tensor.shape, None), tensor)
    assert {path.name for path in checkpoint.files} == {FIRST, SECOND}
    assert all(torch.equal(tensor, right[name]) for name, tensor in read_tensors(copy).items())
    weights, _ = read_weights(engine_args(copy), 3)
    assert torch.equal(weights["fc.weight"], right["mtp.fc.weight"])
    assert torch.equal(weights["norm.weight"], right["mtp.norm.weight"])


def test_what_the_index_names_and_is_not_there(copy: Path, engine_args: Make, served: Make) -> None:
    right = split(copy)
    name = min(right)
    index = json.loads((copy / INDEX).read_text())
    with safe_open(copy / FIRST, framework="pt") as file:
        less = {key: file.get_tensor(key) for key in file.keys() if key != name}
    save_file(less, copy / FIRST, metadata={"format": "pt"})
    for load in (
        served,
        lambda folder: Checkpoint.of(engine_args(folder), "model").read(
            name, right[name].shape, None
        ),
    ):
        with pytest.raises(InvalidConfig, match=f"{name} .*{INDEX} places it in {FIRST}"):
            load(copy)
    (copy / FIRST).unlink()
    with pytest.raises(InvalidConfig, match=f"{INDEX} of .* names {FIRST}, which is not there"):
        require_safetensors(str(copy))
    (copy / INDEX).write_text(json.dumps(index["weight_map"]))
    with pytest.raises(InvalidConfig, match="no readable weight_map"):
        require_safetensors(str(copy))

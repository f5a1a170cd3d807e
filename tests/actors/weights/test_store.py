"""Versions on a node: whole by a rename, two at most."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rayfin.actors.errors import InvalidConfig, InvalidRequest, StorageFull
from rayfin.actors.model_files.digests import tensors_digest
from rayfin.actors.weights import writer as writing
from rayfin.actors.weights.sources import folder_version, place_version, propose
from rayfin.actors.weights.spans import SpanLog, VersionSpan, as_json
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.tensors import plain_name, tensors_version
from rayfin.actors.weights.version import WeightVersion


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "app" / "engine")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "odd": torch.randn(3, generator=draw).bfloat16(),
        "one": torch.randn((), generator=draw),
        "two.weight": torch.randn(5, 7, generator=draw),
        "none": torch.zeros(0, 4, dtype=torch.float16),
    }


def test_a_file_of_tensors(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any header fits, numbers lie where torch can map them, and the digest is the file's."""
    for room in (writing.HEADER_BYTES, 8):
        monkeypatch.setattr(writing, "HEADER_BYTES", room)
        version = tensors_version(store, tensors(0), "a")
        read = load_file(version.place)
        assert all(torch.equal(read[name], own) for name, own in tensors(0).items())
        assert tensors_digest(version.files) == version.digest
        with safe_open(version.place, framework="pt") as file:
            assert file.get_slice("two.weight")[1:3, :].shape == (2, 7)
    other = tensors_version(store, tensors(1), "b")
    assert other.digest != version.digest
    assert not list(store.folder.glob("*.part"))


def test_two_versions_at_most(store: WeightStore) -> None:
    files = []
    for seed in range(4):
        version = propose(store, tensors_version(store, tensors(seed)))
        assert (version.serial, version.label) == (seed + 1, str(seed + 1))
        assert store.proposed == version and store.current.serial == seed
        files.append(len(list(store.folder.glob("*.safetensors"))))
        assert store.commit(version) == version == store.current
        assert store.commit(version) == version  # an engine beside it
    assert files == [1, 2, 2, 2] and store.proposed is None
    with pytest.raises(InvalidConfig, match="send them again"):
        store.commit(WeightVersion(9, "nine", "d9", "/nowhere"))
    other = propose(store, tensors_version(store, tensors(8)))
    with pytest.raises(InvalidConfig, match="send them again"):
        store.commit(WeightVersion(other.serial, "nine", "d9", "/nowhere"))
    propose(store, tensors_version(store, tensors(9)))
    store.drop()
    assert store.proposed is None and len(list(store.folder.glob("*.safetensors"))) == 1
    assert WeightStore(store.folder).current.serial == 4


def test_a_file_from_another_node(store: WeightStore, tmp_path: Path) -> None:
    sent = tensors_version(WeightStore(tmp_path / "else" / "where"), tensors(0), "a")
    content = Path(sent.place).read_bytes()
    away = WeightVersion(1, "a", sent.digest, "/nowhere/at/all")
    with pytest.raises(InvalidRequest, match="send the weights"):
        place_version(store, away)
    with pytest.raises(InvalidRequest, match="not the tensors"):
        place_version(store, away, [content[:-2], b"xx"])
    assert not list(store.folder.glob("*.safetensors")) and store.proposed is None
    placed = place_version(store, away, [content[:1000], content[1000:]])
    assert Path(placed.place).parent == store.folder and store.proposed == placed
    assert place_version(store, away) == placed  # for the engine beside it


def test_a_full_disk(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "replace", full)
    with pytest.raises(StorageFull, match="no room"):
        tensors_version(store, tensors(0))
    assert not list(store.folder.glob("*.part"))


def test_a_folder_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(InvalidConfig, match="written by others"):
        WeightStore(tmp_path / "shared")


def test_a_folder_of_the_trainer(store: WeightStore, tmp_path: Path) -> None:
    save_file(tensors(0), tmp_path / "model.safetensors")
    version = propose(store, folder_version(str(tmp_path), "mine"))
    assert version.place == str(tmp_path) and version.label == "mine"
    store.commit(version)
    store.drop()
    assert (tmp_path / "model.safetensors").exists()


def test_names_without_wrappers() -> None:
    wrapped = "module._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight"
    assert plain_name(wrapped) == "model.layers.0.mlp.up_proj.weight"


def test_spans_are_joined() -> None:
    log = SpanLog([VersionSpan("default", 3)])
    for label, kept in [("default", False), ("1", False), ("1", False), ("2", True)]:
        log.add(label, 2, kept=kept)
    log.add("2", 0)
    assert as_json(log.spans) == [
        {"version": "default", "start": 0, "end": 5},
        {"version": "1", "start": 5, "end": 9},
        {"version": "2", "start": 9, "end": 11, "kv": "kept"},
    ]

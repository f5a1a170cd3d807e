"""Versions on a node: whole by a rename, two at most."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rayfin.actors.errors import InvalidConfig, InvalidRequest, StorageFull
from rayfin.actors.model_files.digests import tensors_digest
from rayfin.actors.weights import sources
from rayfin.actors.weights import writer as writing
from rayfin.actors.weights.sources import folder_version, place_version, propose
from rayfin.actors.weights.spans import SpanLog, VersionSpan, as_json
from rayfin.actors.weights.store import WeightStore, store_of
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


def test_a_folder_is_read_once(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines beside the ingress that has read it need not; after a write they do."""
    path = tmp_path / "model.safetensors"
    save_file(tensors(0), path)

    def written(ago: int) -> None:
        os.utime(path, ns=(at := time.time_ns() - ago, at))

    read = list[list[Path]]()

    def digest(files: list[Path]) -> str:
        read.append(files)
        return tensors_digest(files)

    monkeypatch.setattr(sources, "tensors_digest", digest)
    for serial, ago, times in ((1, 10**9 + 1, 1), (2, 1, 2)):  # a clock that has not moved on
        written(ago)
        version = replace(folder_version(str(tmp_path), "a", store), serial=serial)
        assert place_version(store, version) == store.proposed == version
        assert len(read) == times
        read.clear()
    written(10**9 + 1)
    version = replace(folder_version(str(tmp_path), "a", store), serial=3)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(InvalidRequest, match="not the tensors"):
        place_version(store, version)


def header(value: object, length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + b"12345678"


def one(*offsets: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": list(offsets)}}


HOSTILE = {
    "empty": b"",
    "longer than the file": header({}, 2**40),
    "longer than all memory": header({}, 2**64 - 1),
    "no object": header([1]),
    "no entries": header({"x": 1, "y": [2]}),
    "no offsets": header({"x": {"dtype": "F32", "shape": [2]}}),
    "nested": header(b"[" * 200_000),
    "no JSON": header(b"\xff{"),
    "outside": header(one(0, 9)),
    "far outside": header(one(0, 2**80)),
    "before": header(one(-8, 0)),
    "backwards": header(one(8, 0)),
    "three": header(one(0, 4, 8)),
    "texts": header(one("0", "8")),
    "no numbers": header(one(None, None)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[kind])
    with pytest.raises(InvalidRequest, match="cannot be read") as refusal:
        folder_version(str(tmp_path))
    assert refusal.value.param == "path"


@pytest.mark.parametrize("path", ["a\0b", "~no-such-user/x", "x" * 5000, "missing"])
def test_a_hostile_path(path: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read") as refusal:
        folder_version(path)
    assert refusal.value.param == "path"


@pytest.mark.parametrize("index", ['{"weight_map": 1}', "[", '{"weight_map": {"x": "../y"}}'])
def test_a_hostile_index(index: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(0), folder / "part.safetensors")
    save_file(tensors(0), tmp_path / "y")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidRequest, match="cannot be read|a link out") as refusal:
        folder_version(str(folder))
    assert refusal.value.param == "path"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="no file"):
        folder_version(str(tmp_path))


def test_what_a_trainer_left_that_died(store: WeightStore) -> None:
    old, new = store.writer(), store.writer()
    parts = sorted(store.folder.glob("*.part"))
    os.utime(parts[0], (1, 1))
    propose(store, tensors_version(store, tensors(0)))
    assert list(store.folder.glob("*.part")) == parts[1:]
    old.abandon()
    new.abandon()


def test_what_ended_sessions_have_left(tmp_path: Path) -> None:
    """Of another cluster that lives, or of this one, nothing goes."""
    names = {"ended": "session_1", "lives": "session_2", "own": "session_3"}
    stores = {name: store_of(str(tmp_path), session, "app", "e") for name, session in names.items()}
    for name, own in stores.items():
        own.touch()
        if name != "lives":
            os.utime(own.folder / "LOCK", (1, 1))
    store_of(str(tmp_path), "session_3", "alone")
    assert [name for name, own in stores.items() if own.folder.exists()] == ["lives", "own"]


def test_an_engine_beside_it_is_faster(store: WeightStore) -> None:
    class Late(WeightStore):
        @property
        def proposed(self) -> WeightVersion | None:
            store.commit(version)
            return super().proposed

    version = propose(store, tensors_version(store, tensors(0)))
    assert Late(store.folder).commit(version) == version


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

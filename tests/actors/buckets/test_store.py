"""Buckets of a store that counts its bytes, breaks off, is busy, or refuses."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from object_store import ObjectStore, serving
from rayfin.actors.buckets.folder import CACHE, bucket_folder
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.adapters.flags import AdapterFlags, folder_in, folders_in

pytest.importorskip("pyarrow", reason="an extra")

URI = "s3://bucket/models/own"
FILES = {"config.json": b"{}", "model.safetensors": random.Random(1).randbytes(200_000)}
BLOCK = 1 << 16


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    root = tmp_path / "store"
    for name, data in FILES.items():
        file = root / "models" / "own" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    store = ObjectStore(root)
    with serving(store) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
        monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
        yield store


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_byte_is_read_once_and_a_restart_reads_none(store: ObjectStore) -> None:
    for _ in range(2):
        assert content(bucket_folder(URI)) == FILES
    assert store.sent == {f"models/own/{name}": len(data) for name, data in FILES.items()}


@pytest.mark.parametrize("cut", range(BLOCK, len(FILES["model.safetensors"]), BLOCK))
def test_a_connection_that_breaks_is_asked_again(store: ObjectStore, cut: int) -> None:
    store.cut, store.cuts = cut, 1
    assert content(bucket_folder(URI)) == FILES
    assert store.cuts == 0


@pytest.mark.slow(reason="the store is asked again and again")
def test_a_store_that_always_breaks_off_is_named_and_what_is_whole_stays(
    store: ObjectStore, tmp_path: Path
) -> None:
    store.cut, store.cuts = BLOCK, 10**6
    with pytest.raises(InvalidConfig, match=rf"{URI}, model.safetensors cannot be read"):
        bucket_folder(URI)
    (kept,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert content(kept) == {"config.json": FILES["config.json"]}
    store.cuts = 0
    store.sent.clear()
    assert content(bucket_folder(URI)) == FILES
    assert list(store.sent) == ["models/own/model.safetensors"]


def test_parts_of_a_reader_that_died_go(store: ObjectStore) -> None:
    left = bucket_folder(URI, weights=False) / "model.safetensors.999999.part"
    left.write_bytes(b"half")
    assert content(bucket_folder(URI)) == FILES


def test_a_busy_store_is_asked_again(store: ObjectStore) -> None:
    store.busy = 1
    assert content(bucket_folder(URI)) == FILES


def test_refusals_are_the_stores_words_without_keys(store: ObjectStore) -> None:
    with pytest.raises(InvalidConfig, match="NO_SUCH_BUCKET"):
        bucket_folder("s3://none/models/own")
    with pytest.raises(InvalidConfig, match="cannot be read|holds no config"):
        bucket_folder("s3://bucket/models/none")
    store.allowed = False
    for ask in (lambda: bucket_folder(URI), AdapterFlags({}, "s3://bucket/adapters").reach):
        with pytest.raises(InvalidConfig, match="ACCESS_DENIED") as refused:
            ask()
        assert "the-key" not in str(refused.value) and "secret" not in str(refused.value)


def test_adapters_in_buckets(store: ObjectStore) -> None:
    root = "s3://bucket/adapters/"
    folder = store.root / "adapters" / "own"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (store.root / "adapters" / "other").mkdir()
    (store.root / "adapters" / "other" / "README.md").write_text("no adapter")
    assert folders_in(root) == {"own": "s3://bucket/adapters/own"}
    found = folder_in(root, "own")
    assert found is not None and content(found)["adapter_model.safetensors"] == b"weights"
    for name in ("other", "none", "../models/own", "..", "own/"):
        assert folder_in(root, name) is None, name
    store.allowed = False
    assert folders_in(root) == {}
    with pytest.raises(InvalidConfig, match="ACCESS_DENIED"):
        folder_in(root, "own")

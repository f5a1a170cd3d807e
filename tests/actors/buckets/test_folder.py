"""Models out of a store: here that of the local files, which pyarrow reads as any other."""

import gzip
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayfin import LLM, SamplingParams
from rayfin.actors.buckets import folder as module
from rayfin.actors.buckets.folder import CACHE, bucket_folder
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.serve.preflight import DEMO_FOLDER

pytest.importorskip("pyarrow", reason="an extra")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "bucket" / "demo"))


def test_small_files_come_first_and_nothing_twice(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bucket / "notes.gz").write_bytes(gzip.compress(b"as it is"))
    uri = f"file://{bucket}"
    folder = bucket_folder(uri, weights=False)
    names = {path.name for path in bucket.iterdir()}
    assert {path.name for path in folder.iterdir()} == names - {"model.safetensors"}
    assert bucket_folder(uri) == folder
    for name in names:
        assert (folder / name).read_bytes() == (bucket / name).read_bytes()
    monkeypatch.setattr(module, "read_file", None)  # a call would fail
    assert bucket_folder(f"{uri}/") == bucket_folder(uri) == folder


def test_new_weights_are_another_folder(bucket: Path) -> None:
    before = bucket_folder(f"file://{bucket}", weights=False)
    os.utime(bucket / "model.safetensors", (1, 1))
    assert bucket_folder(f"file://{bucket}", weights=False) != before


def test_a_file_that_was_cut_is_read_again_or_refused(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = 0
    write = module._write

    def cut(part: Path, source: Any) -> None:
        nonlocal cuts
        cuts += 1
        if cuts <= most:
            part.write_bytes(b"half")
        else:
            write(part, source)

    monkeypatch.setattr(module, "_write", cut)
    most = 2
    with pytest.raises(InvalidConfig, match="changes while it is read"):
        bucket_folder(f"file://{bucket}")
    most = 3
    folder = bucket_folder(f"file://{bucket}")
    assert {path.name for path in folder.iterdir()} == {path.name for path in bucket.iterdir()}
    for path in bucket.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_what_is_wrong_is_said_without_credentials(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        bucket_folder(f"file://{bucket}-none")
    (bucket / "config.json").unlink()
    with pytest.raises(InvalidConfig, match="holds no config.json"):
        bucket_folder(f"file://{bucket}")
    error = OSError("https://key:secret@host/x has refused")
    assert "secret" not in str(module._refused("s3://bucket", error))


@pytest.mark.parametrize(
    "uri", ["s3://key:secret@bucket/a", "s3://key:se/secret@bucket/a", "gs://secret@bucket/a"]
)
def test_keys_in_an_address_are_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(InvalidConfig, match="environment") as refused:
        bucket_folder(uri)
    assert "secret" not in str(refused.value)


def test_files_stay_inside_of_their_folder(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["config.json", "a/../../evil"]

    class Store:
        def get_file_info(self, selector: object) -> list[Any]:
            info = {"size": 1, "mtime_ns": 1, "is_file": True}
            return [SimpleNamespace(path=f"root/{name}", **info) for name in names]

    monkeypatch.setattr(module, "_open", lambda uri: (Store(), "root"))
    with pytest.raises(InvalidConfig, match="outside of its folder: a/../../evil"):
        bucket_folder("s3://root")


def test_a_cache_that_cannot_be_written_is_named(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    with pytest.raises(InvalidConfig, match=f"{CACHE} names another"):
        bucket_folder(f"file://{bucket}")


def test_a_bucket_is_asked_for_its_region_unless_one_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyarrow import fs

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(fs, "S3FileSystem", lambda **options: given.append(options))
    monkeypatch.setattr(fs, "resolve_s3_region", lambda name: f"of-{name}")
    for name in (*module.REGIONS, *module.ENDPOINTS):
        monkeypatch.delenv(name, raising=False)
    module._open("s3://anonymous@bucket/folder")
    monkeypatch.setenv("AWS_REGION", "here")
    module._open("s3://bucket/folder")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    module._open("s3://bucket/folder")
    store = {"endpoint_override": "store:9000", "scheme": "http"}
    assert given == [{"anonymous": True, "region": "of-bucket"}, {}, store]


@pytest.mark.slow(reason="loads a model twice")
def test_a_model_of_a_bucket_has_the_same_tokens(bucket: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = []
    for name in ("demo", f"file://{bucket}"):
        with LLM(name, threads=1, kv_cache_memory=2**24) as llm:
            texts.append(llm.generate("What is 3 + 4?", params, use_tqdm=False)[0].outputs[0])
    assert texts[0].token_ids == texts[1].token_ids

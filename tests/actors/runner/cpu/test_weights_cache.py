"""The folder of packed weights: names by content, a bounded size, broken files, many processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rayfin.actors.runner.cpu.weights_cache import SUFFIX, WeightsCache

PROCESSES = """
import sys
from pathlib import Path
import numpy as np
from rayfin.actors.runner.cpu.weights_cache import WeightsCache
cache = WeightsCache(Path(sys.argv[1]), 3 << 20)
for number in range(30):
    key = f"key{number % 3}"
    found = cache.find(key)
    if found is not None:
        assert (found[1][0] == number % 3).all() and found[0] == {"number": number % 3}
    cache.keep(key, {"number": number % 3}, [np.full(300_000, number % 3)])
"""


@pytest.fixture
def cache(tmp_path: Path) -> WeightsCache:
    return WeightsCache(tmp_path / "cache", 10_000)


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob(f"*{SUFFIX}"))


def test_a_key_follows_from_content_and_settings(cache: WeightsCache, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"weights")
    key = cache.key([model], {"dtype": "float32"})
    assert key == cache.key([model], {"dtype": "float32"})
    assert key != cache.key([model], {"dtype": "bfloat16"})
    model.write_bytes(b"weighty")  # of the same size, and perhaps in the same tick of the clock
    assert key != cache.key([model], {"dtype": "float32"})
    elsewhere = tmp_path / "copy" / "model.safetensors"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(b"weights")
    assert key == cache.key([elsewhere], {"dtype": "float32"})


def test_a_file_is_read_again_only_if_it_has_changed(
    cache: WeightsCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfin.actors.runner.cpu.weights_cache.FILE_SETTLED_SECONDS", -1.0)
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"weights")
    key = cache.key([model], {})
    (note,) = (tmp_path / "cache").iterdir()
    note.write_text("00" * 32)
    assert cache.key([model], {}) != key, "it was read"
    note.write_text("torn")
    assert cache.key([model], {}) == key
    os.utime(model, ns=(1, 1))
    note.write_text("00" * 32)
    assert cache.key([model], {}) == key


def test_what_is_kept_is_found(cache: WeightsCache) -> None:
    assert cache.find("a") is None
    assert cache.keep("a", {"x": 1}, [np.arange(5)])
    found = cache.find("a")
    assert found is not None and found[0] == {"x": 1} and found[1][0].tolist() == [0, 1, 2, 3, 4]


def test_a_broken_file_is_ignored_with_a_line(
    cache: WeightsCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.keep("a", {}, [np.arange(100)])
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")
    assert cache.find("a") is None
    assert "is ignored: its content has changed" in caplog.text
    assert not files(tmp_path)
    assert cache.keep("a", {}, [np.arange(100)]) and cache.find("a") is not None


def test_what_was_used_longest_ago_leaves(tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path / "cache", 22_000)  # a file has a page more than its arrays
    for number, key in enumerate("abc"):
        assert cache.keep(key, {}, [np.zeros(3000, np.uint8)])
        os.utime(tmp_path / "cache" / (key + SUFFIX), (number, number))
    assert cache.find("a") is not None
    cache.keep("d", {}, [np.zeros(3000, np.uint8)])
    assert [path.stem for path in files(tmp_path)] == ["a", "c", "d"]


def test_what_is_too_large_is_not_kept(
    cache: WeightsCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.keep("a", {}, [np.zeros(30, np.uint8)])
    assert not cache.keep("b", {}, [np.zeros(10_001, np.uint8)])
    assert "are not kept" in caplog.text and len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = WeightsCache(tmp_path / "file", 10_000)
    assert not cache.keep("a", {}, [np.zeros(3)])
    assert cache.find("a") is None
    assert "are not kept" in caplog.text


def test_abandoned_files_leave(cache: WeightsCache, tmp_path: Path) -> None:
    cache.keep("a", {}, [np.zeros(3)])
    old, new = (tmp_path / "cache" / f"{name}.part" for name in ("old", "new"))
    old.write_text("")
    new.write_text("")
    os.utime(old, (1, 1))
    cache.keep("b", {}, [np.zeros(3)])
    assert new.exists() and not old.exists()


def test_many_processes(tmp_path: Path) -> None:
    """All find what was kept, or nothing, while files come and leave."""
    run = [sys.executable, "-c", PROCESSES, str(tmp_path / "cache")]
    started = [subprocess.Popen(run, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and "ignored" not in errors, errors

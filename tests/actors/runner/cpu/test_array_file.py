"""A file of arrays gives what was written, or says that it does not."""

from pathlib import Path

import numpy as np
import pytest

from rayfin.actors.errors import BrokenFile
from rayfin.actors.runner.cpu import array_file
from rayfin.actors.runner.cpu.array_file import read_arrays, write_arrays

META = {"name": "x", "numbers": [1, 0.1]}
ARRAYS = [
    np.arange(300, dtype=np.float32).reshape(3, 100),
    np.zeros(0, np.uint8),
    np.arange(array_file.LARGE_BYTES + 3, dtype=np.int64).astype(np.uint8),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "arrays"
    write_arrays(where, META, ARRAYS, mode=0o600)
    return where


def test_what_was_written(path: Path) -> None:
    meta, arrays = read_arrays(path)
    assert meta == META
    for array, expected in zip(arrays, ARRAYS, strict=True):
        assert array.dtype == expected.dtype and np.array_equal(array, expected)
        assert not array.size or (not array.flags.writeable and array.ctypes.data % 64 == 0)
    assert [each.name for each in path.parent.iterdir()] == ["arrays"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_arrays_outlive_their_file(path: Path) -> None:
    _, arrays = read_arrays(path)
    write_arrays(path, {}, [np.zeros(7)], mode=0o600)
    path.unlink()
    assert np.array_equal(arrays[2], ARRAYS[2])


def test_any_changed_byte_is_noticed(path: Path) -> None:
    """Of the arrays; and of the header, but not of its padding."""
    content = path.read_bytes()
    header = array_file.START.unpack(content[: array_file.START.size])[1]
    first = len(content) - sum(array.nbytes for array in ARRAYS)
    places = [0, 20, 30, array_file.START.size + header // 2, len(content) - 1, first + 4000]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(BrokenFile):
            read_arrays(path)


@pytest.mark.parametrize("kept", [0, 10, 60, 3000, 500_000, -1])
def test_a_torn_file_is_noticed(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BrokenFile):
        read_arrays(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        write_arrays(path, {}, [np.ones(3)], mode=0o600)
    assert read_arrays(path)[0] == META
    assert [each.name for each in path.parent.iterdir()] == ["arrays"]

"""Pages come back from files bit by bit, or not at all."""

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.messages import PageTransfer
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.runner.pages import transfers
from rayfin.actors.runner.pages.transfers import PageTransfers
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.cache.page_files import PageFolder

PAGES, SIZE = 8, 2
LAYOUTS = [KVLayout(2, 3, 3), KVLayout(1, 4, 0)]
HASHES = [bytes([number]) * 32 for number in range(PAGES)]
TOKENS = np.arange(PAGES * SIZE, dtype=np.int32).reshape(PAGES, SIZE)
STEP = (5, 7)


class Disk:
    """A cache, its folder and what was overwritten."""

    def __init__(self, path: Path, dtype: torch.dtype, max_bytes: int = 1 << 20) -> None:
        self.folder = PageFolder(str(path), "a" * 24, max_bytes)
        self.overwritten: list[int] = []
        self.next_step = (STEP[0], STEP[1] + 1)
        self.pages = PageTransfers(
            0, lambda: self.next_step, lambda pages: self.overwritten.extend(pages), PageNames()
        )
        self.cache = KVTensors(LAYOUTS, PAGES, SIZE, dtype, torch.device("cpu"))
        self.pages.use(self.cache, STEP[0], self.folder)
        for tensor in self.tensors:
            tensor.copy_(torch.randint(0, 120, tensor.shape, dtype=torch.uint8))
        self.before = [tensor.clone() for tensor in self.tensors]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [own.view(torch.uint8) for own in (*self.cache.keys, *self.cache.values)]

    def run(self, pages: list[int], hashes: list[int], *, write: bool, **more: Any) -> int:
        transfer = PageTransfer(
            write=write,
            pages=pages,
            hashes=[HASHES[number] for number in hashes],
            tokens=TOKENS[hashes],
            before=[],
            after=STEP,
        )
        return self.pages.run(replace(transfer, **more))

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def file(self, number: int) -> Path:
        return self.folder.file(HASHES[number])


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    yield Disk(tmp_path / "pages", request.param)


@pytest.fixture
def plain(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "pages", torch.float32)


def test_there_and_back(disk: Disk) -> None:
    """Into other pages than they came from; a device's other pages stay."""
    assert disk.run([1, 4, 2], [0, 1, 2], write=True) == 3
    for folder in (disk.file(0).parent, disk.folder.home(), disk.folder.home().parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    disk.clear()
    assert disk.run([7, 0, 3], [0, 1, 2], write=False) == 3
    for tensor, before in zip(disk.tensors, disk.before, strict=True):
        assert torch.equal(tensor[[7, 0, 3]], before[[1, 4, 2]])
        assert not tensor[[1, 2, 4, 5, 6]].any()
    assert disk.overwritten == [7, 0, 3]
    assert (disk.file(0).stat().st_mode & 0o777, disk.folder.holds(HASHES[3])) == (0o600, False)


def test_what_is_missing_ends_a_read(plain: Disk) -> None:
    plain.run([0, 1, 2], [0, 1, 2], write=True)
    plain.file(1).unlink()
    assert plain.run([4, 5, 6], [0, 1, 2], write=False) == 1
    assert plain.overwritten == [4]


@pytest.mark.parametrize("damage", ["cut", "flip", "longer", "head", "empty", "tokens"])
def test_a_broken_file_is_removed(plain: Disk, damage: str) -> None:
    plain.run([0, 1], [0, 1], write=True)
    content = bytearray(plain.file(1).read_bytes())
    match damage:
        case "cut":
            content = content[:-1]
        case "flip":
            content[-5] ^= 1
        case "longer":
            content += b"x"
        case "head":
            content[0] ^= 1
        case "empty":
            content.clear()
        case "tokens":
            plain.file(0).rename(plain.file(1))
    if damage != "tokens":
        plain.file(1).write_bytes(content)
    plain.run([0], [0], write=True)
    assert plain.run([4, 5], [0, 1], write=False) == 1
    assert not plain.file(1).exists() and plain.file(0).exists()


def test_ends_of_prompts_leave_first(tmp_path: Path) -> None:
    """What was used last stays longest, and of one prompt its beginning."""
    disk = Disk(tmp_path, torch.float32)
    disk.run([0, 1, 2, 3], [0, 1, 2, 3], write=True)
    size = disk.file(0).stat().st_size
    small = Disk(tmp_path, torch.float32, max_bytes=6 * size)
    for number in range(4):
        os.utime(disk.file(number), (1000 - number, 1000 - number))
    assert small.run([0, 1], [0, 1], write=False) == 2  # so these are used now
    assert small.run([0, 1, 2, 3], [4, 5, 6, 7], write=True) == 4
    left = {number for number in range(8) if small.file(number).exists()}
    assert {0, 4, 5, 6, 7} <= left and not {2, 3} & left
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) <= 6 * size


def test_files_of_others_stay(tmp_path: Path) -> None:
    """In a folder that has other things, too."""
    others = [tmp_path / "film.part", tmp_path / "mine" / "a.page", tmp_path / "00" / "b.page"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1 << 16))
    disk = Disk(tmp_path, torch.float32, max_bytes=1000)
    disk.run([0, 1, 2, 3], [0, 1, 2, 3], write=True)
    disk.run([], [], write=True, forget=True)
    assert all(path.exists() for path in others)
    assert not any(disk.file(number).exists() for number in range(4))


def test_a_prefix_stays_as_long_as_what_follows(plain: Disk) -> None:
    plain.run([0, 1], [0, 1], write=True)
    for number in range(2):
        os.utime(plain.file(number), (1000, 1000))
    plain.run([2], [2], write=True, before=HASHES[:2])
    times = [plain.file(number).stat().st_mtime_ns for number in range(3)]
    assert times[0] > times[1] > times[2] > 1000 * 10**9


def test_a_reset_removes_what_is_the_models(plain: Disk, tmp_path: Path) -> None:
    plain.run([0], [0], write=True)
    other = tmp_path / "pages" / ("b" * 24) / "00" / f"{HASHES[0].hex()}.page"
    other.parent.mkdir(parents=True)
    other.touch()
    plain.run([], [], write=True, forget=True)
    assert not plain.file(0).exists() and other.exists()


def test_a_read_waits_for_the_steps_before(plain: Disk) -> None:
    """One of them may still write to a page that was freed."""
    plain.run([0], [0], write=True)
    plain.clear()
    plain.next_step = STEP
    read: list[int] = []
    thread = threading.Thread(target=lambda: read.append(plain.run([5], [0], write=False)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not any(tensor.any() for tensor in plain.tensors)
    plain.next_step = (STEP[0], STEP[1] + 1)
    thread.join(10)
    assert read == [1]


def test_a_read_does_not_wait_for_ever(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PAGE_READ_SECONDS", 0.01)
    plain.run([0], [0], write=True)
    plain.next_step = STEP
    assert plain.run([5], [0], write=False) == 0


@pytest.mark.parametrize("write", [True, False])
def test_a_transfer_of_another_epoch_touches_nothing(plain: Disk, write: bool) -> None:
    plain.run([0], [0], write=True)
    plain.pages.use(plain.cache, STEP[0] + 1, plain.folder)
    assert plain.run([5], [1 if write else 0], write=write) == 0
    assert not plain.file(1).exists() and not plain.overwritten
    plain.pages.use(None, STEP[0], plain.folder)
    assert plain.run([5], [1 if write else 0], write=write) == 0


def test_a_full_disk(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of a file that could not be written whole."""
    plain.run([0], [0], write=True)

    def full(file: int, buffers: list[memoryview]) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "writev", full)
    assert plain.run([0, 1], [0, 1], write=True) == 0
    assert [path.name for path in Path(plain.folder.path).rglob("*.p*")] == [plain.file(0).name]


def test_short_moves(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may move less than it was asked for."""
    writev, readv = os.writev, os.readv
    monkeypatch.setattr(os, "writev", lambda file, own: writev(file, [own[0][:7]]))
    monkeypatch.setattr(os, "readv", lambda file, own: readv(file, [own[0][:5]]))
    assert plain.run([3], [3], write=True) == 1
    plain.clear()
    assert plain.run([3], [3], write=False) == 1
    for tensor, before in zip(plain.tensors, plain.before, strict=True):
        assert torch.equal(tensor[3], before[3])

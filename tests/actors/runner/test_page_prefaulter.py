"""Pages are backed by memory ahead of their use, and no further."""

import ctypes
import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rayfin.actors.runner import page_prefaulter as first_touch
from rayfin.actors.runner.page_prefaulter import PagePrefaulter
from rayfin.cache.kv_tensors import HUGE_BYTES, KVLayout, KVTensors

pytestmark = pytest.mark.slow(reason="fills gigabytes of memory")

PAGES = 4 * HUGE_BYTES // 4096
SYSTEM_PAGE = mmap.PAGESIZE
SOURCE = Path(__file__).parents[3] / "src"


def resident(tensor: torch.Tensor) -> torch.Tensor:
    """Which of a tensor's pages [num_pages] lie in memory, as the system tells it."""
    start = tensor.data_ptr() // SYSTEM_PAGE * SYSTEM_PAGE
    length = tensor.data_ptr() + tensor.nbytes - start
    states = (ctypes.c_ubyte * -(-length // SYSTEM_PAGE))()
    libc = ctypes.CDLL(None)
    assert not libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), states)
    first = (tensor.data_ptr() - start + torch.arange(len(tensor)) * tensor[0].nbytes).tolist()
    return torch.tensor([states[byte // SYSTEM_PAGE] & 1 for byte in first], dtype=torch.bool)


def wait_for(tensor: torch.Tensor, pages: int) -> torch.Tensor:
    """Once the last of ``pages`` is there; the thread only runs when no other thread wants to."""
    deadline = time.monotonic() + 60
    while not (state := resident(tensor))[pages - 1]:
        assert time.monotonic() < deadline, "never backed"
        time.sleep(0.01)
    return state


@pytest.fixture
def cache() -> KVTensors:
    layouts = [KVLayout(2, 128, 64)] * 2  # 4,096 and 2,048 bytes a page
    return KVTensors(layouts, PAGES, 4, torch.float32, torch.device("cpu"))


def test_the_next_pages_are_backed_and_no_others(cache: KVTensors) -> None:
    tensors = [*cache.keys, *cache.values]
    assert not resident(cache.keys[0]).any()
    touch = PagePrefaulter(tensors, ahead=PAGES // 8)
    try:
        for tensor in tensors:
            state = wait_for(tensor, PAGES // 8)
            assert state[: PAGES // 8].all() and not state[PAGES // 2 :].any()
        touch.reach(PAGES // 2)
        for tensor in tensors:
            wait_for(tensor, PAGES // 2 + PAGES // 8)
        touch.reach(3)  # far below: nothing is taken back, nothing more is wanted
        touch.reach(PAGES - 1)
        for tensor in tensors:
            assert wait_for(tensor, PAGES).all()
    finally:
        touch.stop()
    assert not any(tensor.any() for tensor in tensors)


def test_what_was_written_stays(cache: KVTensors) -> None:
    cache.keys[1][:64] = 3.0
    cache.values[0][-64:] = 4.0
    touch = PagePrefaulter([*cache.keys, *cache.values], ahead=PAGES)
    for tensor in (*cache.keys, *cache.values):
        wait_for(tensor, PAGES)
    touch.stop()
    assert (cache.keys[1][:64] == 3.0).all() and not cache.keys[1][64:].any()
    assert (cache.values[0][-64:] == 4.0).all() and not cache.values[0][:-64].any()


def test_a_system_without_it_does_without(
    cache: KVTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_touch, "MADV_POPULATE_WRITE", 12345)
    touch = PagePrefaulter([*cache.keys, *cache.values], ahead=PAGES)
    touch._thread.join(60)
    assert not touch._thread.is_alive()
    touch.reach(PAGES - 1)
    touch.stop()
    assert not resident(cache.keys[0]).any()


def test_the_thread_ends_before_the_interpreter() -> None:
    """Which would abort the process where a thread comes back from a call into it."""
    script = (
        "import atexit, threading, torch\n"
        "from rayfin.actors.runner.page_prefaulter import PagePrefaulter\n"
        "atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))\n"
        "PagePrefaulter([torch.empty(1 << 14, 1024)], 1 << 14)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=SOURCE
    )
    assert done.stdout.strip() == "['MainThread']", done.stderr

"""Gives host pages their memory before a step writes them first: the system clears it, slowly."""

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Sequence

import torch

from rayfin.actors.messages import SchedulerInfo
from rayfin.actors.runner.observers import Observer
from rayfin.cache.kv_tensors import KVTensors

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later; the ``mmap`` module has no name for it."""

AHEAD_TOKENS = 16_384
AHEAD_BYTES = 1 << 30
"""Pages for so many tokens, and no more memory, are made ready before they are used."""

STRIDE_BYTES = 2 << 20
"""Of a tensor at a time: a huge page."""


class PagePrefaulter(Observer):
    """A thread that has the system back the next ``ahead`` pages with memory, lowest ids first.

    ``PagePool`` allocates pages by ascending id the first time, so the next ones are above the
    highest that ``reach`` was given. The thread runs at idle priority: a step that comes before it
    pays for its own memory, as it would without the thread. A cache thus takes the memory of used
    pages and of ``ahead`` more, not of all pages.

    ``tensors`` are the cache's keys and values, [num_pages, ...] each, on the host.
    """

    in_turn = False

    @classmethod
    def over(cls, cache: KVTensors, page_bytes: int) -> "PagePrefaulter | None":
        """Of a cache whose pages have ``page_bytes`` bytes; None if it is not on the host."""
        if cache.device.type != "cpu" or not cache.num_pages or not cache.keys:
            return None
        ahead = min(AHEAD_TOKENS // cache.page_size, AHEAD_BYTES // max(page_bytes, 1))
        return cls(cache.tensors, ahead)

    def __init__(self, tensors: Sequence[torch.Tensor], ahead: int) -> None:
        self._tensors = tensors
        self._num_pages = len(tensors[0])
        self._ahead = ahead
        self._wanted = min(ahead, self._num_pages)
        self._woken = threading.Event()
        self._woken.set()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="first-touch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread inside a call at exit would abort the interpreter

    def before(self, info: SchedulerInfo) -> None:
        if len(info.new_pages):
            self.reach(int(info.new_pages.max()))

    def reach(self, page: int) -> None:
        """Prepares the pages above ``page``, which is in use."""
        wanted = min(page + 1 + self._ahead, self._num_pages)
        if wanted > self._wanted:
            self._wanted = wanted
            self._woken.set()

    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops the thread; returns when it has."""
        self._stopped = True
        self._woken.set()
        self._thread.join()
        atexit.unregister(self.stop)

    def _run(self) -> None:
        try:
            madvise = _madvise()
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
            done, stride = 0, self._stride()
            while self._woken.wait() and not self._stopped:
                self._woken.clear()
                while done < self._wanted and not self._stopped:
                    for tensor in self._tensors:
                        _populate(madvise, tensor[done : done + stride])
                    done += stride
        except (AttributeError, OSError) as error:
            logger.debug("pages are backed as they are written: %s", error)

    def _stride(self) -> int:
        """Pages that fill a huge page of the smallest tensor."""
        smallest = min(tensor[0].nbytes for tensor in self._tensors)
        return max(STRIDE_BYTES // max(smallest, 1), 1)


def _madvise() -> "ctypes._FuncPointer":
    """libc's, which lets go of the interpreter's lock while it works."""
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _populate(madvise: "ctypes._FuncPointer", pages: torch.Tensor) -> None:
    size = os.sysconf("SC_PAGESIZE")
    start = pages.data_ptr() // size * size
    length = pages.data_ptr() + pages.nbytes - start
    if pages.nbytes and madvise(start, length, MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), "madvise(MADV_POPULATE_WRITE)")

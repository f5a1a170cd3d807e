"""Logs how far a load is: tensors, bytes and seconds.

transformers reads tensors by several threads and reports to a progress bar. A server's log gets
lines instead, at most one in ``LOAD_LOG_SECONDS``, so a slow disk or a large model shows.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from rayfin.actors.timing import LOAD_LOG_SECONDS

logger = logging.getLogger(__name__)


@contextmanager
def logged_load(model: str, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Logs the progress of transformers' loads in the block, and what they took."""
    progress = _Progress(model, clock)
    before = transformers_logging.set_tqdm_hook(progress.bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)
    progress.log("read")


class _Progress:
    """Counts the bytes of tensors as transformers' threads have read them."""

    def __init__(self, model: str, clock: Callable[[], float]) -> None:
        self._model, self._clock = model, clock
        self._started = self._logged = clock()
        self._bytes = self._done = self._total = 0
        self._lock = threading.Lock()

    def bar(self, factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """What transformers iterates in place of its bar; on a terminal the bar itself."""
        items = args[0] if args else None
        if items is None or not hasattr(items, "__len__"):
            return factory(*args, **kwargs)
        self._total += len(items)
        for item in items:
            self._watch(item)
        shown = factory(*args, **kwargs) if sys.stderr.isatty() else items
        return self._counted(shown)

    def log(self, verb: str) -> None:
        """A line with what has been read so far."""
        seconds = self._clock() - self._started
        logger.info(
            "%s: %s %d of %d tensors, %.2f GB, in %.1f s",
            *(self._model, verb, self._done, self._total, self._bytes / 1e9, seconds),
        )

    def _counted(self, items: Any) -> Iterator[Any]:
        for item in items:
            yield item
            self._done += 1
            if self._clock() - self._logged >= LOAD_LOG_SECONDS:
                self._logged = self._clock()
                self.log("reading,")

    def _watch(self, item: Any) -> None:
        """``item`` is a parameter's name and the tensors that it is made of, in futures."""
        collected = getattr(item[1], "collected_tensors", None) if isinstance(item, tuple) else None
        for tensors in (collected or {}).values():
            for tensor in tensors:
                if isinstance(tensor, Future):
                    tensor.add_done_callback(self._add)

    def _add(self, tensor: Future[Any]) -> None:
        if tensor.exception() is None and isinstance(tensor.result(), torch.Tensor):
            with self._lock:
                self._bytes += tensor.result().nbytes

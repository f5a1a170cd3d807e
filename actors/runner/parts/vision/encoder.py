"""Runs a model's tower once for each image or clip, and keeps the embeddings of the last ones."""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rayfin.actors import failpoints
from rayfin.actors.errors import RequestFailed
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.part import MediaInput, MediaUsage
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.parts.vision.arrays import fetch
from rayfin.actors.runner.parts.vision.towers import find_tower


class MediaEncoder(Observer):
    """Embeddings of images or clips by their digests: the least recently used ones go first.

    Args:
        model: the base model of transformers.
        max_bytes: of the embeddings that are kept.
        kind: of what its tower reads.

    Raises:
        UnsupportedModel: it has no tower that can be run apart.
    """

    in_turn = False  # it only counts

    def __init__(self, model: Any, max_bytes: int, kind: MediaKind = "image") -> None:
        self._model, self._tower = model, find_tower(model, kind)
        self.threads: int | None = None  # of torch while the tower runs; None: as they are
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.num_bytes = 0  # of the embeddings kept
        self.num_encoded = 0  # images and clips that were computed
        self._hits = self._evictions = 0  # since the last result ...
        self._seconds: list[float] = []  # ... and of each one that was computed

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        if self._hits or self._evictions or self._seconds:
            news = self._hits, self._evictions, tuple(self._seconds)
            result.usage.append(MediaUsage(self.num_bytes, *news))
            self._hits = self._evictions = 0
            self._seconds = []

    def embeddings(self, media: MediaInput, count: int, *, begins: bool = True) -> torch.Tensor:
        """The embeddings [count, 1 + L, hidden] of an image or clip: inputs, and what L layers add.

        Args:
            begins: the step has its first token.

        Raises:
            RequestFailed: its arrays are gone, or its encoder gives another number.
        """
        kept = self._kept.get(media.digest)
        if kept is not None:
            self._kept.move_to_end(media.digest)
            self._hits += begins
        else:
            arrays = fetch(media.arrays)
            started = time.perf_counter()
            kept = self.encode(arrays)
            if kept.is_cuda:  # so far its kernels are only queued
                torch.cuda.synchronize(kept.device)
            self._seconds.append(time.perf_counter() - started)
            self.num_encoded += 1
            self._keep(media.digest, kept)
            if failpoints.ACTIVE:
                failpoints.ACTIVE.hit("runner.image")
        if len(kept) != count:
            raise RequestFailed(f"an image or clip has {len(kept)} embeddings for {count} tokens")
        return kept

    @torch.inference_mode()
    def encode(self, arrays: Mapping[str, np.ndarray]) -> torch.Tensor:
        """The embeddings [N, 1 + L, hidden] of an image or clip, by transformers' own code."""
        # A language model on compiled kernels leaves one thread to torch, and the tower is torch's.
        with _torch_threads(self.threads):
            output = self._tower(arrays, self._model.device, self._model.dtype)
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.stack([_joined(layer) for layer in layers], dim=1)

    def clear(self) -> None:
        """Drops all embeddings, and what is counted of them."""
        self._kept.clear()
        self.num_bytes = self.num_encoded = 0
        self._hits = self._evictions = 0
        self._seconds = []

    def _keep(self, digest: bytes, embeddings: torch.Tensor) -> None:
        self._kept[digest] = embeddings
        self.num_bytes += embeddings.nbytes
        while self.num_bytes > self._max_bytes and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.nbytes
            self._evictions += 1


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _joined(embeddings: Any) -> torch.Tensor:
    """The rows [N, hidden] of an image or clip, which some models give in parts."""
    parts = [embeddings] if isinstance(embeddings, torch.Tensor) else list(embeddings)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

"""A ``StepModel`` whose steps may hold parts of images or clips."""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from rayfin.actors.media.part import VIRTUAL_TOKENS, MediaInput
from rayfin.actors.messages import Int64Array
from rayfin.actors.runner.batch import GivenInputs, StepInputs
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.parts.vision.media_slots import MediaSlots
from rayfin.cache.kv_tensors import KVLayout, KVTensors


class Embeddings(Protocol):
    """Gives the embeddings of images or clips: ``MediaEncoder``, or what stands for it."""

    def embeddings(self, media: MediaInput, count: int, *, begins: bool = True) -> torch.Tensor:
        """The embeddings [count, 1 + L, hidden]: inputs, and what L layers add."""
        ...


class VisionModel:
    """Puts the embeddings of images or clips into a step, then runs the language model over it.

    A step without them runs as that of a text model.
    """

    def __init__(
        self, text: StepModel, encoder: Embeddings, slots: MediaSlots, media_token_id: int
    ) -> None:
        self.text, self.encoder, self.slots = text, encoder, slots
        self._media_token_id = media_token_id

    @property
    def layouts(self) -> list[KVLayout]:
        return self.text.layouts

    @property
    def dtype(self) -> torch.dtype:
        return self.text.dtype

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""
        self.text.bind(cache)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        if len(self.slots) and inputs.slots is not None:
            self._put_images(inputs)
        # Also without images: a draft may be copied from an earlier prompt that had some.
        virtual = inputs.input_ids < VIRTUAL_TOKENS
        inputs.input_ids = inputs.input_ids.masked_fill(virtual, self._media_token_id)
        return self.text.forward(inputs)

    def _put_images(self, inputs: StepInputs) -> None:
        assert inputs.slots is not None
        starts = np.asarray(inputs.batch.query_start_cpu, np.int64)
        ends = np.asarray(inputs.batch.kv_len_cpu, np.int64)
        index: list[Int64Array] = []
        states: list[torch.Tensor] = []
        rope: Int64Array | None = None
        sees_to: Int64Array | None = None
        for row, slot in enumerate(inputs.slots.tolist()):
            media = self.slots.get(slot)
            if media is None:
                continue
            first, count = int(starts[row]), int(starts[row + 1] - starts[row])
            start = int(ends[row]) - count
            for image, at in media.placed:
                low, high = np.searchsorted(at, (start, start + count)).tolist()
                if low < high:
                    embeddings = self.encoder.embeddings(image, len(at), begins=low == 0)
                    index.append(at[low:high] - start + first)
                    states.append(embeddings[low:high])
            if media.whole and media.whole[-1][1] >= start:
                if sees_to is None:
                    sees_to = _positions(starts, ends)
                sees_to[first : first + count] = media.sees_to(start, count)
            if media.rope is not None:
                if rope is None:
                    plain = _positions(starts, ends)
                    rope = np.broadcast_to(plain, (3, len(plain))).copy()
                rope[:, first : first + count] = media.rope_positions(start, count)
        device = inputs.input_ids.device
        if index:
            places = torch.from_numpy(np.concatenate(index)).to(device)
            rows = torch.cat(states)
            added = rows[:, 1:] if rows.shape[1] > 1 else None
            inputs.given = GivenInputs(places, rows[:, 0], added)
        if sees_to is not None:
            inputs.batch = replace(inputs.batch, sees_to=sees_to.astype(np.int32))
        if rope is not None:
            inputs.rope_positions = torch.from_numpy(rope).to(device)


def _positions(starts: Int64Array, ends: Int64Array) -> Int64Array:
    """Positions [T] of all tokens of a step."""
    counts = np.diff(starts)
    offsets = np.repeat(ends - counts - starts[:-1], counts)
    return np.arange(int(counts.sum())) + offsets

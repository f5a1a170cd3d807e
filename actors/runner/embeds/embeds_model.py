"""A ``StepModel`` whose steps may hold embeddings that came with their requests."""

import numpy as np
import torch

from rayfin.actors.embeds.embeds_input import ROWS, EmbedsInput
from rayfin.actors.images.image_input import VIRTUAL_TOKENS
from rayfin.actors.messages import NewRequest, SchedulerInfo
from rayfin.actors.runner.models.paged_model import StepModel
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.step.batch import GivenInputs, StepInputs
from rayfin.actors.runner.vision.pixels import fetch
from rayfin.cache.kv_tensors import KVLayout, KVTensors


class EmbedsSlots(Observer):
    """The embeddings of running requests by slot, by the diffs of steps."""

    def __init__(self) -> None:
        self._slots: dict[int, EmbedsInput] = {}
        self._rows: dict[int, torch.Tensor] = {}  # of prompts of which chunks are still to come

    def __len__(self) -> int:
        return len(self._slots)

    def before(self, info: SchedulerInfo) -> None:
        for slot in info.finished:
            self._forget(slot)
        for new in info.new_requests:
            self.enter(new)

    def enter(self, new: NewRequest) -> None:
        """Takes a request into its slot."""
        self._forget(new.handle)
        if new.embeds is not None:
            self._slots[new.handle] = new.embeds

    def close(self) -> None:
        self._slots.clear()
        self._rows.clear()

    def part(self, slot: int, start: int, end: int) -> torch.Tensor | None:
        """The rows [N, hidden] of the prompt's positions from ``start`` to ``end``, if any.

        Raises:
            RequestFailed: the process that had them is gone.
        """
        own = self._slots.get(slot)
        if own is None or start >= own.length:
            return None
        rows = self._rows.get(slot)
        if rows is None:
            rows = self._rows[slot] = as_tensor(own)
        if end >= own.length:  # a preempted request fetches them again
            del self._rows[slot]
        return rows[start:end]

    def _forget(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._rows.pop(slot, None)


class EmbedsModel:
    """Puts the embeddings of prompts into a step, then runs the model over it.

    A step without them runs as ever.

    Args:
        dtype: of the model's own embeddings.
        scale: what the rows are multiplied with, where transformers' model does that itself.
    """

    def __init__(
        self, model: StepModel, slots: EmbedsSlots, dtype: torch.dtype, scale: float = 1.0
    ) -> None:
        self._model, self.slots = model, slots
        self._dtype, self._scale = dtype, scale

    @property
    def layouts(self) -> list[KVLayout]:
        return self._model.layouts

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""
        self._model.bind(cache)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        if len(self.slots) and inputs.slots is not None:
            inputs.given = self._given(inputs)
        # Also in other steps: a draft may be copied from an earlier prompt of embeddings.
        virtual = inputs.input_ids < VIRTUAL_TOKENS
        inputs.input_ids = inputs.input_ids.masked_fill(virtual, 0)
        return self._model.forward(inputs)

    def _given(self, inputs: StepInputs) -> GivenInputs | None:
        assert inputs.slots is not None
        starts = np.asarray(inputs.batch.query_start_cpu, np.int64)
        ends = np.asarray(inputs.batch.kv_len_cpu, np.int64)
        index: list[np.ndarray] = []
        states: list[torch.Tensor] = []
        for row, slot in enumerate(inputs.slots.tolist()):
            first, count = int(starts[row]), int(starts[row + 1] - starts[row])
            end = int(ends[row])
            part = self.slots.part(slot, end - count, end)
            if part is not None:
                index.append(np.arange(first, first + len(part)))
                states.append(part)
        if not index:
            return None
        device = inputs.input_ids.device
        rows = torch.cat([part.to(device, self._dtype) for part in states])
        if self._scale != 1.0:
            rows = rows.float() * self._scale
        return GivenInputs(torch.from_numpy(np.concatenate(index)).to(device), rows)


def as_tensor(embeds: EmbedsInput) -> torch.Tensor:
    """The rows [length, hidden] on the host, in the dtype that they came in.

    Raises:
        RequestFailed: the process that had them is gone.
    """
    rows = torch.from_numpy(np.array(fetch(embeds.rows, "a prompt of embeddings")[ROWS]))
    return rows.view(torch.bfloat16) if embeds.dtype == "bfloat16" else rows

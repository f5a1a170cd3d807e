"""A ``StepModel`` whose steps may hold embeddings that came with their requests."""

from collections.abc import Iterator

import numpy as np
import torch

from rayfin.actors.media.part import ROWS, VIRTUAL_TOKENS, EmbedsInput
from rayfin.actors.messages import BoolArray, Int32Array, NewRequest, SchedulerInfo
from rayfin.actors.parts import all_of
from rayfin.actors.runner.batch import GivenInputs, StepInputs
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.parts.vision.arrays import fetch
from rayfin.cache.kv_tensors import KVLayout, KVTensors


class EmbedsSlots(Observer):
    """The embeddings in prompts of running requests by slot, by the diffs of steps."""

    in_turn = False  # no step with new embeddings is queued ahead

    def __init__(self) -> None:
        self._slots: dict[int, tuple[EmbedsInput, ...]] = {}
        # Of embeddings of which chunks are still to come, by their first position.
        self._rows: dict[int, dict[int, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def alters(self, slots: Int32Array) -> BoolArray | None:
        """Finds which of the ``slots`` [R] have embeddings in their prompts; None: none."""
        return np.isin(slots, list(self._slots)) if self._slots else None

    def before(self, info: SchedulerInfo) -> None:
        for slot in info.finished:
            self._forget(slot)
        for new in info.new_requests:
            self.enter(new)

    def enter(self, new: NewRequest) -> None:
        """Takes a request into its slot."""
        self._forget(new.handle)
        embeds = all_of(new.parts, EmbedsInput)
        if embeds:
            self._slots[new.handle] = embeds

    def close(self) -> None:
        self._slots.clear()
        self._rows.clear()

    def parts(self, slot: int, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The rows among the prompt's positions from ``start`` to ``end``.

        Yields:
            The position of the first row, and neighbouring rows [N, hidden].

        Raises:
            RequestFailed: the process that had them is gone.
        """
        given = self._slots.get(slot)
        if not given or start >= given[-1].end:  # it decodes
            return
        for embeds in given:
            if start < embeds.end and embeds.start < end:
                first, last = max(start, embeds.start), min(end, embeds.end)
                rows = self._read(slot, embeds, last)
                yield first, rows[first - embeds.start : last - embeds.start]

    def _read(self, slot: int, embeds: EmbedsInput, last: int) -> torch.Tensor:
        """All rows of ``embeds``, kept until its last one is read."""
        kept = self._rows.setdefault(slot, {})
        rows = kept.pop(embeds.start, None)
        if rows is None:  # a preempted request fetches them again
            rows = as_tensor(embeds)
        if last < embeds.end:
            kept[embeds.start] = rows
        elif not kept:
            del self._rows[slot]
        return rows

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
            for position, part in self.slots.parts(slot, end - count, end):
                place = first + position - (end - count)
                index.append(np.arange(place, place + len(part)))
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

"""Heads of a model draft: small layers that read its hidden states (EAGLE-3, MTP).

A head guesses the token after the next one from the next token and the model's states before it.
Its layer is one more layer of the cache, on the model's pages. What it holds decides drafts only,
never tokens.

The states of tokens whose next one is known are computed where they come (prompts) or wait in a
ring until the head drafts, or until the ring is full: where drafting pauses, the head computes
many tokens at once and costs little. (Li et al., EAGLE-3, 2025; DeepSeek-V3, 2024.)
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.messages import Int32Array, Int64Array, NewRequest
from rayfin.actors.runner.batch import StepInputs, build_inputs
from rayfin.actors.runner.cpu.build_decoder import TOLERANCE
from rayfin.actors.runner.cpu.packed_layers import pack_linears
from rayfin.actors.runner.loading import LoadedModel
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.step_model import HookedStates, ShowsStates, StepModel
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.speculation.draft_model import CLASSES, chunks, prompts_of
from rayfin.actors.runner.speculation.head_model import HeadModel
from rayfin.actors.runner.speculation.interface import DraftPart, Drafts, TokenTable
from rayfin.actors.runner.speculation.taps import States
from rayfin.actors.step_cost import StepCost
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.select import select_attention

RING = 32
"""States of a request that wait for its head. A step with drafts has fewer tokens."""


class Follower(Protocol):
    """Sees the states of each step's tokens."""

    def before(self, inputs: StepInputs) -> None:
        """A step comes: its states will take the places of old ones."""

    def after(self, inputs: StepInputs, states: torch.Tensor) -> None:
        """The step has given ``states`` [T, width]."""


class HeadedModel:
    """A ``StepModel`` whose cache has the layer of a head behind its own."""

    def __init__(self, target: StepModel, head: PagedModel, states: States) -> None:
        module = head.transformer
        assert isinstance(module, HeadModel)
        self.target = target
        self.head = head
        self.module = module
        self.layouts: list[KVLayout] = [*target.layouts, *head.layouts]
        self.dtype = target.dtype
        self.follower: Follower | None = None  # until a runner starts
        self._states = states

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers of both keep their keys and values in ``cache``."""
        target_layers = len(self.target.layouts)
        self.target.bind(cache.layers(0, target_layers))
        self.head.bind(cache.layers(target_layers, len(self.layouts)))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        if self.follower is None or inputs.slots is None:
            return self._forward_alone(inputs)
        self.follower.before(inputs)
        logits = self.target.forward(inputs)
        self.follower.after(inputs, self._states())
        return logits

    def run_head(
        self, inputs: StepInputs, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's logits [S, D] and states [S, hidden] of the tokens at ``inputs.sampled``.

        Args:
            states: [T, hidden] before the tokens: the model's, narrowed, or the head's own.
        """
        self.module.given = states
        try:
            logits = self.head.forward(inputs)
        finally:
            self.module.given = None
        return logits, self.module.left

    def _forward_alone(self, inputs: StepInputs) -> torch.Tensor:
        """A step of no request, to see what it costs: the head computes its prompts too."""
        logits = self.target.forward(inputs)
        if inputs.first_prompt < inputs.batch.rows:
            prompts = prompts_of(inputs)
            states = self._states()[-len(prompts.input_ids) :]
            self.run_head(prompts, self.module.narrow(states))
        return logits


class HeadProposer:
    """Drafts with a ``HeadedModel``: one step of the head for each token of a draft, over all rows.

    Args:
        slots: the runner's, for the page tables.
        most_tokens: tokens of the largest step that memory was measured with.
    """

    def __init__(
        self,
        model: HeadedModel,
        slots: RequestSlots,
        *,
        page_size: int,
        max_len: int,
        most_tokens: int,
        device: torch.device,
    ) -> None:
        count = len(slots.last_token)
        self._model = model
        self._slots = slots
        self._page_size = page_size
        self._max_len = max_len
        self._most_tokens = most_tokens
        self._device = device
        self._texts = TokenTable(count, max_len)
        self._cost: StepCost | None = None  # until a step has run
        width = model.module.width
        self._ring = torch.zeros(count, RING, width, dtype=model.dtype, device=device)
        # Of each slot, the head has computed the positions below `seen`, and the ring has the
        # states of those from there to `held`.
        self._seen: Int64Array = np.zeros(count, np.int64)
        self._held: Int64Array = np.zeros(count, np.int64)
        model.follower = self

    def add(self, slot: int, request: NewRequest) -> None:
        """Starts a request with the tokens of its history."""
        assert request.history is not None
        self._texts.add(slot, request.history)
        self._seen[slot] = self._held[slot] = 0

    def remove(self, slot: int) -> None:
        """Drops the slot's request."""
        self._texts.remove(slot)

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """Appends the first ``counts`` [N] of the ``tokens`` [N, W] to the ``slots`` [N]."""
        self._texts.accept(slots, tokens, counts)

    def seconds(self, rows: int) -> float:
        """What one step of the head over so many rows takes; 0 before one has run."""
        return 0.0 if self._cost is None else float(self._cost.seconds(rows))

    def before(self, inputs: StepInputs) -> None:
        """Computes states that the step's would displace, of all its rows at once."""
        slots, starts, ends = _spans(inputs)
        # After a prefix hit, or pages that came back, the states before are nowhere.
        lost = (starts > self._held[slots]) | (starts < self._seen[slots])
        self._seen[slots[lost]] = self._held[slots[lost]] = starts[lost]
        seen = self._seen[slots]
        waiting = (self._texts.lengths[slots] > starts) & (seen < starts)
        if (waiting & (ends - seen > RING)).any():
            self._catch_up(slots[waiting], starts[waiting])

    def after(self, inputs: StepInputs, states: torch.Tensor) -> None:
        """Computes prompts as far as their next tokens are known; the ring keeps the rest."""
        slots, starts, ends = _spans(inputs)
        known = np.minimum(ends, self._texts.lengths[slots] - 1)
        prompts = np.arange(len(slots)) >= inputs.first_prompt
        rows = np.flatnonzero(prompts & (known > starts))
        query = np.asarray(inputs.batch.query_start_cpu[:-1], np.int64)
        if len(rows):
            counts = known[rows] - starts[rows]
            given = self._model.module.narrow(states[self._index(_ranges(query[rows], counts))])
            fed = self._next(slots[rows], starts[rows], known[rows])
            self._run(slots[rows], starts[rows], counts, fed, given)
            self._seen[slots[rows]] = known[rows]
        first = np.maximum(np.maximum(ends - RING, self._seen[slots]), starts)
        counts = np.maximum(ends - first, 0)
        places = _ranges(first, counts) % RING
        at = self._index(_ranges(query + first - starts, counts))
        kept = states[at].to(self._ring.dtype)
        self._ring[self._index(np.repeat(slots, counts)), self._index(places)] = kept
        self._held[slots] = ends

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        """Guesses at most ``room`` [N] next tokens of the ``slots`` [N]."""
        lengths = self._texts.lengths[slots]
        ends = lengths - 1  # the last token has not been fed, so it has no state
        room = np.minimum(room, np.maximum(self._max_len - lengths, 0))
        ready = (self._seen[slots] < ends) & (self._held[slots] >= ends)
        rows = np.flatnonzero(ready & (room > 0))
        tokens = np.zeros((len(slots), int(room[rows].max(initial=0))), np.int32)
        drafted, trust = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        if len(rows):
            guesses, chances, states = self._catch_up(slots[rows], ends[rows])
            tokens[rows, 0], drafted[rows] = guesses, 1
            trust[rows] = np.searchsorted(CLASSES, chances)
        for column in range(1, tokens.shape[1]):
            more = room[rows] > column
            rows, states = rows[more], states[self._index(np.flatnonzero(more))]
            starts, fed = ends[rows] + column - 1, tokens[rows, column - 1]
            guesses, _, states = self._run(slots[rows], starts, np.ones_like(starts), fed, states)
            tokens[rows, column] = guesses
            drafted[rows] += 1
        return Drafts(tokens, drafted, trust)

    def _catch_up(
        self, slots: Int64Array, ends: Int64Array
    ) -> tuple[Int32Array, np.ndarray, torch.Tensor]:
        """Computes what the head has missed before ``ends`` [N]: at least one position of each.

        Returns:
            What ``_run`` gives for the slots [N].
        """
        outputs = []
        for part in self._parts(ends - self._seen[slots]):
            part_slots, last = slots[part], ends[part]
            first = self._seen[part_slots]
            counts = last - first
            places = self._index(_ranges(first, counts) % RING)
            waiting = self._ring[self._index(np.repeat(part_slots, counts)), places]
            fed = self._next(part_slots, first, last)
            outputs.append(
                self._run(part_slots, first, counts, fed, self._model.module.narrow(waiting))
            )
            self._seen[part_slots] = last
        tokens, chances, states = zip(*outputs, strict=True)
        return np.concatenate(tokens), np.concatenate(chances), torch.cat(states)

    def _parts(self, counts: Int64Array) -> Iterator[slice]:
        """Cuts rows of ``counts`` [N] tokens into steps that are not too large."""
        start, total = 0, 0
        for row, count in enumerate(counts.tolist()):
            if total and total + count > self._most_tokens:
                yield slice(start, row)
                start, total = row, 0
            total += count
        yield slice(start, len(counts))

    def _next(self, slots: Int64Array, starts: Int64Array, ends: Int64Array) -> Int32Array:
        """The tokens behind the positions from ``starts`` [N] to ``ends`` [N] of the slots [N]."""
        counts = ends - starts
        places = np.repeat(slots, counts), _ranges(starts + 1, counts)
        tokens: Int32Array = self._texts.tokens[places]
        return tokens

    @torch.inference_mode()
    def _run(
        self,
        slots: Int64Array,
        starts: Int64Array,
        counts: Int64Array,
        tokens: Int32Array,
        states: torch.Tensor,
    ) -> tuple[Int32Array, np.ndarray, torch.Tensor]:
        """One step of the head over ``counts`` [N] positions from ``starts`` [N] on.

        Args:
            tokens: behind those positions, of all slots, one after the other.
            states: [T, hidden] at those positions.

        Returns:
            The likeliest tokens [N] after the last ones, their chances [N], and states [N, hidden].
        """
        started = time.perf_counter()
        info = chunks(slots, starts, counts, tokens, self._slots.num_pages[slots])
        inputs, _ = build_inputs(info, self._slots, self._page_size, self._device)
        logits, left = self._model.run_head(inputs, states)
        logits = logits.float()
        highest, likeliest = logits.max(dim=-1)
        chances = (highest - logits.logsumexp(dim=-1)).exp().cpu().numpy()
        guesses = self._model.module.tokens_of(likeliest).cpu().numpy().astype(np.int32)
        seconds = time.perf_counter() - started
        if self._cost is None:
            self._cost = StepCost.guessed(len(tokens), seconds, self._most_tokens)
        else:
            self._cost.observe(len(tokens), seconds)
        return guesses, chances, left

    def _index(self, values: Int64Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def with_head(
    loaded: LoadedModel, args: EngineArgs, head: HeadModel, states: States
) -> LoadedModel:
    """The model with the layer of ``head``, which is put on the kernels of its device.

    Raises:
        InvalidConfig: pages of the head cannot be read by its attention.
    """
    device, kernels = loaded.device, loaded.kernels
    paged = PagedModel(head, select_attention(device, loaded.model.dtype, args.attention, kernels))
    if kernels is not None and loaded.model.dtype in TOLERANCE:
        pack_linears(paged, kernels)
    if loaded.gpu_model is not None:
        assert isinstance(loaded.gpu_model, ShowsStates) and isinstance(states, HookedStates)
        loaded.gpu_model.hooked.append(states)
    part = DraftPart(len(loaded.model.layouts), RING * head.width * loaded.model.dtype.itemsize)
    return replace(
        loaded,
        model=HeadedModel(loaded.model, paged, states),
        parts=(*loaded.parts, part),
    )


def require_states(loaded: LoadedModel, args: EngineArgs) -> None:
    """Raises unless a head can read the states of the model.

    Raises:
        InvalidConfig: it gives vectors, or reads images.
    """
    why = None
    if not loaded.samples:
        why = "it gives vectors"
    elif any(part.sees_ahead for part in loaded.parts):
        why = "it reads images"
    if why:
        raise InvalidConfig(
            f"speculative_config: no head can draft for {args.model}: {why}", "speculative_config"
        )


def _spans(inputs: StepInputs) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The slots [R] of a step's rows, and their positions: the first, and behind the last."""
    assert inputs.slots is not None
    ends = np.asarray(inputs.batch.kv_len_cpu, np.int64)
    query = np.asarray(inputs.batch.query_start_cpu, np.int64)
    return inputs.slots.astype(np.int64), ends - query[1:] + query[:-1], ends


def _ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """``counts`` [N] numbers from ``starts`` [N] on, one range after the other."""
    before = np.cumsum(counts) - counts
    numbers: Int64Array = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return numbers

"""From a step's hidden states to its requests' vectors; takes the place of a ``Sampler``."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rayfin.actors.errors import NumericalError
from rayfin.actors.messages import (
    NO_TOKEN,
    BoolArray,
    Float32Array,
    Int32Array,
    Int64Array,
    Logprobs,
    SchedulerInfo,
)
from rayfin.actors.model_files.pooling_recipe import Mode, Pooling, PoolingRecipe
from rayfin.actors.runner.batch import SampledRows, StepInputs
from rayfin.actors.runner.sampling.sampler import NOT_FINITE, Sampled


class Head(Protocol):
    """What stands behind the pooling: dense layers and normalization, or a classifier."""

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[N, H] fp32 -> [N, D] fp32; a row's bits do not depend on the other rows."""
        ...


@dataclass(slots=True)
class _Running:
    """One request's hidden states so far, of the chunks that were computed."""

    pooling: Pooling
    sums: "Sums"
    tokens: list[torch.Tensor]  # of a task for each token: [L, H] of each chunk
    computed: int = 0  # tokens that are in them: a step that fails is computed again in parts


class Sums:
    """What the modes of a recipe keep of a prompt's hidden states, chunk after chunk.

    Sums are fp64 and in the order of positions, so that chunking changes no bit of a vector.
    """

    def __init__(self, modes: tuple[Mode, ...], skip: int) -> None:
        self._modes = modes
        self._skip = skip  # leading tokens that are left out
        self._count = self._weight = 0
        self._sum: torch.Tensor | None = None  # [H] fp64
        self._weighted: torch.Tensor | None = None
        self._first = self._last = self._highest = torch.empty(0)

    def add(self, states: torch.Tensor, start: int) -> None:
        """Adds hidden states [L, H] of the positions from ``start`` on."""
        skipped = min(max(self._skip - start, 0), len(states))
        start, states = start + skipped, states[skipped:]
        if not len(states):
            return
        if not len(self._first):
            self._first = states[0].clone()
        self._last = states[-1].clone()
        if "max" in self._modes:
            highest = states.max(dim=0).values
            self._highest = highest if not self._count else torch.maximum(self._highest, highest)
        if {"mean", "mean_sqrt_len_tokens"} & set(self._modes):
            self._sum = _add_rows(self._sum, states.double())
        if "weightedmean" in self._modes:
            weights = torch.arange(start + 1, start + len(states) + 1, device=states.device)
            self._weighted = _add_rows(self._weighted, states.double() * weights[:, None])
            self._weight += int(weights.sum())
        self._count += len(states)

    def pooled(self) -> torch.Tensor:
        """The vector [modes * H] fp32."""
        parts = [self._part(mode) for mode in self._modes]
        return torch.cat(parts).float()

    def _part(self, mode: Mode) -> torch.Tensor:
        if mode == "cls":
            return self._first
        if mode == "lasttoken":
            return self._last
        if mode == "max":
            return self._highest
        if mode == "weightedmean":
            assert self._weighted is not None
            return (self._weighted / self._weight).float()
        assert self._sum is not None
        count = self._count if mode == "mean" else self._count**0.5
        return (self._sum / count).float()


def _add_rows(total: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """``total`` [H] plus all rows [L, H], one after the other."""
    if total is not None:
        rows = torch.cat([total.unsqueeze(0), rows])
    return rows.cumsum(dim=0)[-1].clone()


class Pooler:
    """Keeps running sums by slot; gives the vectors of the prompts that end in a step."""

    def __init__(self, recipe: PoolingRecipe, head: Head, num_slots: int) -> None:
        self._recipe = recipe
        self._head = head
        self._running: dict[int, _Running] = {}  # by slot
        self._num_slots = num_slots

    def apply_diff(self, info: SchedulerInfo) -> None:
        """Drops the step's finished requests and starts its new ones."""
        for slot in info.finished:
            self._running.pop(slot, None)
        for new in info.new_requests:
            pooling = new.part(Pooling)
            if pooling is not None:  # a step that measures memory has none
                sums = Sums(self._recipe.modes, pooling.skip)
                self._running[new.handle] = _Running(pooling, sums, [])

    def add_scored(self, info: SchedulerInfo, inputs: StepInputs) -> None:
        """Asks the forward for the states of whole prompts, behind those of the last tokens."""
        self._set_types(info, inputs)
        index = self._whole_index(info)
        if len(index):
            inputs.sampled = torch.cat([inputs.sampled, torch.from_numpy(index).to(inputs.sampled)])

    def sample(self, info: SchedulerInfo, at: SampledRows, states: torch.Tensor) -> Sampled:
        """Vectors of the rows whose prompt ends, from the states [S + P, H]."""
        result = Sampled(np.full(len(info.ids), NO_TOKEN, np.int32))
        last, whole = states[: len(at.rows)].float(), states[len(at.rows) :].float()
        self._collect(info, whole)
        bad = ~torch.isfinite(last).all(dim=1).cpu().numpy()
        ended = [(int(row), int(slot)) for row, slot in zip(at.rows, at.slots, strict=True)]
        for place, (row, slot) in enumerate(ended):
            running = self._running.get(slot)
            if running is None:
                continue
            vector = None if bad[place] else self._vector(running, last[place])
            if vector is None or not np.isfinite(vector).all():
                result.errors[row] = NumericalError(NOT_FINITE)
            else:
                result.vectors[row] = vector
        return result

    def take_usage(self) -> None:
        """None: it reports nothing."""

    def needs_host(self, info: SchedulerInfo) -> BoolArray:
        """[R] all rows: no CUDA graph gives hidden states."""
        return np.ones(len(info.ids), np.bool_)

    def row_token_rules(self, info: SchedulerInfo) -> None:
        """None: no logits, no rules."""

    def replayed(
        self, info: SchedulerInfo, tokens: Int32Array, logprobs: Logprobs | None
    ) -> Sampled:
        """Never called: no CUDA graph gives hidden states."""
        raise AssertionError("a step that pools is not replayed")

    def rollback(self, info: SchedulerInfo, tokens: Int32Array) -> None:
        """Does nothing: a chunk that is computed again is not added again."""

    def _set_types(self, info: SchedulerInfo, inputs: StepInputs) -> None:
        """Token types, if the step has pairs: 1 from where the second text begins."""
        seconds = {
            slot: running.pooling.second
            for slot in info.ids.tolist()
            if (running := self._running.get(slot)) and running.pooling.second is not None
        }
        if not seconds:
            return
        types = np.zeros(len(info.merge_prompt), np.int64)
        for (slot, start, length), begins in zip(_chunks(info), info.kv_len.tolist(), strict=True):
            if (second := seconds.get(slot)) is not None:
                types[start + max(second - begins, 0) : start + length] = 1
        inputs.token_types = torch.from_numpy(types).to(inputs.input_ids)

    def _whole_index(self, info: SchedulerInfo) -> Int64Array:
        parts = [
            np.arange(start, start + length)
            for slot, start, length in _chunks(info)
            if (running := self._running.get(slot)) is not None and running.pooling.whole
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _collect(self, info: SchedulerInfo, states: torch.Tensor) -> None:
        taken = 0
        for (slot, _, length), begins in zip(_chunks(info), info.kv_len.tolist(), strict=True):
            running = self._running.get(slot)
            if running is None or not running.pooling.whole:
                continue
            part = states[taken : taken + length]
            taken += length
            if begins < running.computed:
                continue
            running.computed = begins + length
            if running.pooling.task.startswith("token_"):
                running.tokens.append(part.clone())
            else:
                running.sums.add(part, begins)

    def _vector(self, running: _Running, last: torch.Tensor) -> Float32Array:
        task = running.pooling.task
        if task.startswith("token_"):
            states = torch.cat(running.tokens)
            vectors = states if task == "token_embed" else self._head(states)
        elif running.pooling.whole:
            vectors = self._head(running.sums.pooled().unsqueeze(0))[0]
        else:
            vectors = self._head(last.unsqueeze(0))[0]
        array: Float32Array = vectors.float().cpu().numpy()
        return array


def _chunks(info: SchedulerInfo) -> list[tuple[int, int, int]]:
    """(slot, start in the step's tokens, length) of each row."""
    columns: list[Int32Array] = [info.ids, info.chunk_idx, info.chunk_len]
    return list(zip(*(column.tolist() for column in columns), strict=True))

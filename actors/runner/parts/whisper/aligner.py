"""Where in a clip the tokens of a transcript are heard: by what they attend to.

Some heads of the cross attention follow the speech. Their weights make a matrix of tokens and
states of the encoder, and the cheapest way through it gives each token a time.

Source: OpenAI's ``find_alignment``; Giorgino, 2009, "Computing and Visualizing Dynamic Time Warping
Alignments in R".
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rayfin.actors.media.part import Alignment
from rayfin.actors.messages import NO_TOKEN, Float32Array, SchedulerInfo, StepResult
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.parts.whisper.split_step import SplitStep

MEDIAN = 7  # states whose median takes the place of the middle one
SECONDS_PER_STATE = 0.02

Matrix = npt.NDArray[np.float64]


@dataclass(slots=True)
class Aligned:
    """What the tokens of one request attend to, so far."""

    alignment: Alignment
    # [heads, tokens, states] by layer, and by the position of the chunk's first token: a step that
    # fails is computed again.
    weights: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlignedStep:
    """The rows of a step that are aligned."""

    heads: dict[int, list[int]]  # by layer
    rows: list[tuple[Aligned, int, int, int]]  # first and past-the-last of D; position of the first
    page_tables: torch.Tensor  # [D, P] of clips

    def watch(self, layer: int, query: torch.Tensor, k_pages: torch.Tensor) -> None:
        """Keeps what the scaled ``query`` [D, heads, size] of a layer attends to."""
        heads = self.heads.get(layer)
        if heads is None:
            return
        for aligned, first, last, position in self.rows:
            count = aligned.alignment.states
            keys = k_pages[self.page_tables[first]].flatten(0, 1)[:count, heads].float()
            scores = torch.einsum("nhs,chs->hnc", query[first:last, heads].float(), keys)
            aligned.weights[layer, position] = scores.softmax(-1).cpu()


class Aligner(Observer):
    """Follows the requests that have an ``Alignment``, and ends them with their times.

    Args:
        heads: by layer, those that follow the speech.
        clip_tokens: in front of each prompt.
    """

    def __init__(self, heads: dict[int, list[int]], clip_tokens: int) -> None:
        self._heads, self._clip_tokens = heads, clip_tokens
        self._slots: dict[int, Aligned] = {}

    def before(self, info: SchedulerInfo) -> None:
        for slot in info.finished:
            self._slots.pop(slot, None)
        for new in info.new_requests:
            self._slots.pop(new.handle, None)
            if (alignment := new.part(Alignment)) is not None:
                self._slots[new.handle] = Aligned(alignment)

    def begin(self, inputs: StepInputs, step: SplitStep) -> AlignedStep | None:
        """Returns what to watch in a step; None: nothing."""
        if not self._slots or inputs.slots is None or step.text is None or step.across is None:
            return None
        text, rows = step.text, []
        for place, row in enumerate(step.rows.tolist()):
            aligned = self._slots.get(int(inputs.slots[row]))
            if aligned is not None:
                first, last = (int(text.query_start_cpu[place + more]) for more in (0, 1))
                position = int(text.kv_len_cpu[place]) - (last - first)
                rows.append((aligned, first, last, position))
        return AlignedStep(self._heads, rows, step.across.page_tables) if rows else None

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        if not self._slots:
            return
        for row, slot in enumerate(info.ids.tolist()):
            aligned = self._slots.get(slot)
            if aligned is None or info.last_pos[row] < 0:
                continue
            result.tokens[row] = NO_TOKEN
            if row not in result.errors:
                result.vectors[row] = self._times(self._slots.pop(slot))

    def close(self) -> None:
        self._slots.clear()

    def _times(self, aligned: Aligned) -> Float32Array:
        """Returns the begin of each token [N + 1]; the last one is an end."""
        chunks = sorted({position for _, position in aligned.weights})
        whole = torch.cat(
            [
                torch.cat([aligned.weights[layer, position] for position in chunks], dim=1)
                for layer in sorted(self._heads)
            ]
        )
        deviation, mean = torch.std_mean(whole, dim=-2, keepdim=True, correction=0)
        whole = (whole - mean) / deviation.clamp(min=1e-9)
        matrix = smoothed(whole).mean(dim=0).double().numpy()
        return cheapest_path(-matrix[aligned.alignment.start - self._clip_tokens :])


def alignment_heads(model: Any) -> dict[int, list[int]]:
    """By layer the heads that follow the speech: all of the upper half where none are named.

    A distilled model often names those of its teacher, whose layers it lacks.
    """
    config = model.config
    named = getattr(model.generation_config, "alignment_heads", None)
    layers, every = config.decoder_layers, list(range(config.decoder_attention_heads))
    heads: dict[int, list[int]] = {}
    for layer, head in named or ():
        if layer < layers and head in every:
            heads.setdefault(int(layer), []).append(int(head))
    return heads or {layer: every for layer in range(layers // 2, layers)}


def smoothed(weights: torch.Tensor) -> torch.Tensor:
    """Medians of ``MEDIAN`` neighbours along the last dimension of [heads, N, F]."""
    side = MEDIAN // 2
    if weights.shape[-1] <= side:
        return weights
    padded = nn.functional.pad(weights, (side, side), mode="reflect")
    return padded.unfold(-1, MEDIAN, 1).median(dim=-1).values


def cheapest_path(costs: Matrix) -> Float32Array:
    """Seconds at which the cheapest way through ``costs`` [N, F] enters each row, [N].

    It goes from the first corner to the last by steps to the next row, column, or both.
    """
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    for way in range(2, rows + columns + 1):  # all places whose row and column have this sum
        row = np.arange(max(1, way - columns), min(rows, way - 1) + 1)
        column = way - row
        before = np.minimum(total[row - 1, column], total[row, column - 1])
        before = np.minimum(before, total[row - 1, column - 1])
        total[row, column] = costs[row - 1, column - 1] + before
    entered = np.zeros(rows, np.float32)
    row, column = rows, columns
    while row > 0:
        entered[row - 1] = (column - 1) * SECONDS_PER_STATE
        both, up, left = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        if both < up and both < left:
            row, column = row - 1, column - 1
        elif up < both and up < left:
            row -= 1
        else:
            column -= 1
    return entered

"""``StepModel``: what a runner needs of a model."""

from typing import Protocol, runtime_checkable

import torch

from rayfin.actors.runner.batch import StepInputs
from rayfin.cache.kv_tensors import KVLayout, KVTensors

Tables = list[tuple[torch.Tensor, torch.Tensor]]
"""Rotary tables of a model: cos and sin [positions, rotary / 2] float32 of each kind of layer."""


class StepModel(Protocol):
    """Computes a step: ``PagedModel``, or a faster replacement."""

    @property
    def layouts(self) -> list[KVLayout]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        ...


class HookedStates:
    """Gives the states [T, width] of a step's tokens that hooks on modules keep.

    Those of a CUDA graph are put back when it is replayed.
    """

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}  # [T, hidden] by their place

    def __call__(self) -> torch.Tensor:
        return torch.cat([self.kept[place] for place in sorted(self.kept)], dim=-1)


@runtime_checkable
class ShowsStates(Protocol):
    """A model whose graphs give again what was hooked when they were recorded."""

    hooked: list[HookedStates]

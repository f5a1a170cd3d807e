"""``StepModel``: what a runner needs of a model."""

from typing import Protocol

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

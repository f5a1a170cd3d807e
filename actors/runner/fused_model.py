"""A fused decoder in the place of a ``PagedModel``."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.interface import PagedBatch
from rayfin.kernels.cpu.decoder import PackedDecoder

FIRST_POSITIONS = 2048
Tables = list[tuple[torch.Tensor, torch.Tensor]]


class FusedModel:
    """Runs a step's packed tokens through compiled kernels: what ``PagedModel`` does, faster."""

    def __init__(
        self,
        decoder: PackedDecoder,
        rotate: Callable[[int], Tables],  # rotary tables of so many positions
        layouts: list[KVLayout],
        dtype: torch.dtype,
    ) -> None:
        self._decoder = decoder
        self._rotate = rotate
        self.layouts = layouts
        self.dtype = dtype  # of the pages, unless others are asked for

    def bind(self, cache: KVTensors) -> None:
        """From now on the layers keep their keys and values in ``cache``."""
        self._decoder.bind(cache.keys, cache.values)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,  # [T] int64
        batch: PagedBatch,
        sampled: torch.Tensor,  # [S] int64, indices in T
    ) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``sampled``; the cache gets all T tokens."""
        longest = int(max(batch.kv_len_cpu, default=0))
        if longest > self._decoder.positions:
            wanted = max(FIRST_POSITIONS, 2 * self._decoder.positions, longest)
            self._decoder.turn_by(self._rotate(wanted))
        return self._decoder.run(input_ids, batch, sampled)


def rotary_tables(
    rotary: nn.Module, config: Any, most: int | None
) -> tuple[list[int], Callable[[int], Tables]]:
    """Which table each layer turns by, and what makes the tables of so many positions.

    The cosines and sines are the model's own module's, scaled as it likes, never for more than
    ``most`` positions: a module that looks at the longest position then sees none that change it.
    """
    layers = config.num_hidden_layers
    by_type = "layer_type" in inspect.signature(rotary.forward).parameters
    types: list[str | None] = list(config.layer_types) if by_type else [None] * layers
    distinct = sorted(set(types), key=str)

    def rotate(count: int) -> Tables:
        positions = torch.arange(count if most is None else min(count, most)).unsqueeze(0)
        like = torch.empty(0)
        tables = []
        for kind in distinct:
            arguments = (like, positions) if kind is None else (like, positions, kind)
            cos, sin = rotary(*arguments)  # [1, positions, rotary_dim], both halves alike
            half = cos.shape[-1] // 2
            tables.append((cos[0, :, :half].clone(), sin[0, :, :half].clone()))
        return tables

    return [distinct.index(kind) for kind in types], rotate

"""How each slot's request samples, and the same as tensors of a step's rows."""

from functools import partial

import numpy as np
import torch

from rayfin.actors.messages import Int32Array, Int64Array, Sampling
from rayfin.kernels.shapes import SamplingRows
from rayfin.kernels.staging import to_device


class RowSettings:
    """Arrays by slot. Steady decode asks for the same rows in each step, and gets the same tensors.

    Owned by ``RequestSlots``.
    """

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.int64)
        # The last rows: their slots, the device, and their tensors.
        self._kept: tuple[bytes, torch.device, partial[SamplingRows]] | None = None

    def set(self, slot: int, sampling: Sampling) -> None:
        """Replaces the slot's settings."""
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self._kept = None

    def of(
        self, slots: Int32Array, positions: Int64Array | Int32Array, device: torch.device
    ) -> SamplingRows:
        """The settings of rows in ``slots`` [S], which sample tokens at ``positions`` [S]."""
        kept, key = self._kept, slots.tobytes()
        if kept is None or kept[:2] != (key, device):
            kept = self._kept = (key, device, self._gathered(slots, device))
        return kept[2](position=to_device(positions.astype(np.int64), device))

    def _gathered(self, slots: Int32Array, device: torch.device) -> "partial[SamplingRows]":
        temperature, top_k = self.temperature[slots], self.top_k[slots]
        top_p, min_p = self.top_p[slots], self.min_p[slots]
        return partial(
            SamplingRows,
            temperature=to_device(temperature, device),
            top_k=to_device(top_k, device),
            top_p=to_device(top_p, device),
            min_p=to_device(min_p, device),
            seed=to_device(self.seed[slots], device),
            all_greedy=not temperature.any(),
            any_top_k=bool(top_k.any()),
            any_top_p=bool((top_p < 1).any()),
            any_min_p=bool(min_p.any()),
        )

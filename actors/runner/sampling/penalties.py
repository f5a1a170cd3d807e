"""Presence, frequency and repetition penalties."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.sampling.device_rules import DeviceRules, TokenCounts
from rayfin.actors.runner.sampling.processor import Rows, float_tensor, token_pairs
from rayfin.kernels.sampling.filters import UsedTokens, apply_penalties
from rayfin.kernels.shapes import to_device


@dataclass(frozen=True, slots=True)
class _Penalized:
    sampling: Sampling
    used: TokenCounts


class Penalties:
    """Counts each slot's tokens; a step takes one operation for all rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, _Penalized] = {}

    def add(self, slot: int, request: NewRequest) -> bool:
        sampling = request.sampling
        if not sampling.penalises:
            return False
        assert request.history is not None, "a request with penalties comes without its history"
        prompt = request.history[: request.prompt_len]
        # Only the repetition penalty looks at the prompt.
        counted = prompt if sampling.repetition_penalty != 1 else prompt[:0]
        counted = counted[counted >= 0]  # no token of an image is ever sampled
        used = TokenCounts(counted, request.history[request.prompt_len :])
        self._slots[slot] = _Penalized(sampling, used)
        return True

    def remove(self, slot: int) -> None:
        del self._slots[slot]

    def is_active(self, slot: int, position: int) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        slots = [self._slots[slot] for slot in rows.slots]
        lengths = [len(slot.used) for slot in slots]

        def spread(values: list[float]) -> torch.Tensor:
            return float_tensor(np.repeat(np.array(values, np.float32), lengths), self._device)

        tokens = (slot.used.tokens for slot in slots)
        row, token = token_pairs(zip(rows.index, tokens, strict=True), self._device)
        counts = np.concatenate([slot.used.counts for slot in slots])
        used = UsedTokens(
            row=row,
            token=token,
            count=to_device(counts, self._device),
            repetition=spread([slot.sampling.repetition_penalty for slot in slots]),
            presence=spread([slot.sampling.presence_penalty for slot in slots]),
            frequency=spread([slot.sampling.frequency_penalty for slot in slots]),
        )
        apply_penalties(logits, used)

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        used = self._slots[slot].used
        for token in tokens:
            used.add(token)

    def rollback(self, slot: int, count: int) -> None:
        self._slots[slot].used.rollback(count)

    def device_rules(self, slot: int) -> DeviceRules | None:
        state = self._slots[slot]
        return DeviceRules(
            used=state.used,
            repetition=state.sampling.repetition_penalty,
            presence=state.sampling.presence_penalty,
            frequency=state.sampling.frequency_penalty,
        )

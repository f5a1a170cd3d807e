"""Rules on single tokens: allowed tokens, bad words, a minimum length, biases (in vLLM's order)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import Int64Array, NewRequest, Sampling
from rayfin.actors.runner.sampling.device_rules import DeviceRules
from rayfin.actors.runner.sampling.processor import Rows, float_tensor, token_pairs
from rayfin.kernels.sampling.filters import add_bias, allow_only, forbid
from rayfin.kernels.shapes import to_device


@dataclass(slots=True)
class _SlotRules:
    sampling: Sampling
    allowed: Int64Array
    biased: Int64Array
    banned: tuple[int, ...]  # early, without the ends of a guided request: its grammar has them
    output: list[int] = field(default_factory=list)  # with bad words

    def forbidden(self, position: int) -> list[int]:
        """Tokens that would complete a bad word now, and those that ``min_tokens`` forbids."""
        output, sampling = self.output, self.sampling
        tokens = [
            word[-1]
            for word in sampling.bad_words
            if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]
        ]
        return [*tokens, *self.banned] if position < sampling.banned_until else tokens


class TokenRules:
    """Keeps each slot's rules as lists of tokens; a step takes one operation of each kind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, _SlotRules] = {}

    def add(self, slot: int, request: NewRequest) -> bool:
        sampling = request.sampling
        if not (
            sampling.bad_words or sampling.allowed or sampling.logit_bias or sampling.banned_until
        ):
            return False
        guidance = request.part(Guidance)
        ends = () if guidance is None else guidance.ends
        rules = _SlotRules(
            sampling,
            np.array(sampling.allowed, np.int64),
            np.array([token for token, _ in sampling.logit_bias], np.int64),
            tuple(token for token in sampling.banned if token not in ends),
        )
        if sampling.bad_words:
            assert request.history is not None, "a request with bad words comes without its history"
            rules.output = request.history[request.prompt_len :].tolist()
        self._slots[slot] = rules
        return True

    def remove(self, slot: int) -> None:
        del self._slots[slot]

    def is_active(self, slot: int, position: int) -> bool:
        rules = self._slots[slot]
        return bool(len(rules.allowed) or len(rules.biased) or rules.forbidden(position))

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        ruled = [
            (row, self._slots[slot], position)
            for row, slot, position in zip(rows.index, rows.slots, rows.positions, strict=True)
        ]
        allowed = [(row, rules.allowed) for row, rules, _ in ruled if len(rules.allowed)]
        never = [(row, never) for row, rules, at in ruled if (never := rules.forbidden(at))]
        biased = [(row, rules) for row, rules, _ in ruled if len(rules.biased)]
        if allowed:
            index = to_device(np.array([row for row, _ in allowed], np.int64), self._device)
            allow_only(logits, index, *token_pairs(allowed, self._device))
        if never:
            forbid(logits, *token_pairs(never, self._device))
        if biased:
            values = [value for _, rules in biased for _, value in rules.sampling.logit_bias]
            pairs = token_pairs(((row, rules.biased) for row, rules in biased), self._device)
            add_bias(logits, *pairs, float_tensor(values, self._device))

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        rules = self._slots[slot]
        if rules.sampling.bad_words:
            rules.output += tokens

    def rollback(self, slot: int, count: int) -> None:
        rules = self._slots[slot]
        if rules.sampling.bad_words and count:
            del rules.output[-count:]

    def device_rules(self, slot: int) -> DeviceRules | None:
        rules = self._slots[slot]
        sampling = rules.sampling
        if any(len(word) > 1 for word in sampling.bad_words):
            return None
        return DeviceRules(
            allowed=sampling.allowed,
            banned=tuple(word[0] for word in sampling.bad_words),
            banned_early=rules.banned,
            banned_until=sampling.banned_until,
            bias=sampling.logit_bias,
        )

"""What changes a row's logits before it is sampled: for the few slots that ask for it.

The order is vLLM's: allowed tokens, bad words, minimum length and bias, penalties. Temperature and
the filters come after (`kernels/sampling`). Rules are kept as lists of tokens by slot and gathered
into one operation of each kind per step, whatever the number of rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rayfin.actors.messages import Int32Array, Int64Array, NewRequest, Sampling, SchedulerInfo
from rayfin.actors.runner.sampling.token_rules import (
    RowTokenRules,
    Ruled,
    TokenCounts,
    make_row_token_rules,
)
from rayfin.kernels.sampling.filters import add_bias, allow_only, forbid
from rayfin.kernels.sampling.penalties import UsedTokens, apply_penalties
from rayfin.kernels.staging import to_device


@dataclass(slots=True)
class _Rules:
    """One slot's settings, and what they need to know of its tokens."""

    sampling: Sampling
    allowed: Int64Array
    biased: Int64Array
    used: TokenCounts | None = None  # with penalties
    output: list[int] = field(default_factory=list)  # with bad words

    def count(self, token: int) -> None:
        if self.used is not None:
            self.used.add(token)
        if self.sampling.bad_words:
            self.output.append(token)

    def forbidden(self, position: int) -> list[int]:
        """Tokens that would complete a bad word now, and those that ``min_tokens`` forbids."""
        output, sampling = self.output, self.sampling
        tokens = [
            word[-1]
            for word in sampling.bad_words
            if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]
        ]
        return [*tokens, *sampling.banned] if position < sampling.banned_until else tokens


class LogitsProcessors:
    """The rules of the slots that have some. A slot without any costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rules: dict[int, _Rules] = {}

    def __len__(self) -> int:
        return len(self._rules)

    def apply_diff(self, info: SchedulerInfo) -> None:
        """Who left, and who is new, with the tokens that came before."""
        for handle in info.finished:
            self._rules.pop(handle, None)
        for new in info.new_requests:
            self._rules.pop(new.handle, None)
            if _asks(new.sampling):
                self._rules[new.handle] = self._make(new)

    def remember(self, slots: Int32Array, tokens: Int32Array) -> None:
        """The tokens [R] just sampled by the slots [R]; negative ones are none."""
        if not self._rules:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if token >= 0 and (rules := self._rules.get(slot)) is not None:
                rules.count(token)

    def process(
        self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array
    ) -> torch.Tensor:
        """Logits [S, V] of the slots [S], each about to sample the token of its position [S].

        Returns:
            The same tensor where no rule has anything to say; else a new one, fp32.
        """
        ruled = [
            (row, rules)
            for row, slot in enumerate(slots.tolist() if self._rules else ())
            if (rules := self._rules.get(slot)) is not None
        ]
        allowed = [(row, rules.allowed) for row, rules in ruled if len(rules.allowed)]
        never = [
            (row, tokens)
            for row, rules in ruled
            if (tokens := rules.forbidden(int(positions[row])))
        ]
        biased = [(row, rules) for row, rules in ruled if len(rules.biased)]
        penalised = [(row, rules) for row, rules in ruled if rules.used is not None]
        if not (allowed or never or biased or penalised):
            return logits
        changed = logits.to(torch.float32, copy=True)
        if allowed:
            rows = self._tensor(np.array([row for row, _ in allowed], np.int64))
            allow_only(changed, rows, *self._pairs(allowed))
        if never:
            forbid(changed, *self._pairs(never))
        if biased:
            values = [value for _, rules in biased for _, value in rules.sampling.logit_bias]
            pairs = self._pairs((row, rules.biased) for row, rules in biased)
            add_bias(changed, *pairs, self._tensor(np.array(values, np.float32)))
        if penalised:
            apply_penalties(changed, self._used(penalised))
        return changed

    def row_token_rules(self, slots: Int32Array, num_steps: int) -> RowTokenRules | None:
        """What the device must know for the rows of a lease, None where no rule is among them."""
        ruled = [
            Ruled(row, rules.sampling, rules.used)
            for row, slot in enumerate(slots.tolist() if self._rules else ())
            if (rules := self._rules.get(slot)) is not None
        ]
        return make_row_token_rules(len(slots), ruled, num_steps) if ruled else None

    def _make(self, new: NewRequest) -> _Rules:
        sampling = new.sampling
        allowed = np.array(sampling.allowed, np.int64)
        rules = _Rules(
            sampling, allowed, np.array([token for token, _ in sampling.logit_bias], np.int64)
        )
        if not sampling.needs_history:
            return rules
        assert new.history is not None, "a request that needs its history came without"
        prompt, output = new.history[: new.prompt_len], new.history[new.prompt_len :]
        if sampling.penalises:
            # Repetition alone looks at the prompt.
            rules.used = TokenCounts(
                prompt if sampling.repetition_penalty != 1 else prompt[:0], output
            )
        if sampling.bad_words:
            rules.output = output.tolist()
        return rules

    def _used(self, ruled: Sequence[tuple[int, _Rules]]) -> UsedTokens:
        """The used tokens of all rows with penalties."""
        rows = [(row, own.used, own.sampling) for row, own in ruled if own.used is not None]
        lengths = [len(used) for _, used, _ in rows]

        def spread(values: list[float]) -> torch.Tensor:
            return self._tensor(np.repeat(np.array(values, np.float32), lengths))

        row, token = self._pairs((row, used.tokens) for row, used, _ in rows)
        return UsedTokens(
            row=row,
            token=token,
            count=self._tensor(np.concatenate([used.counts for _, used, _ in rows])),
            repetition=spread([sampling.repetition_penalty for _, _, sampling in rows]),
            presence=spread([sampling.presence_penalty for _, _, sampling in rows]),
            frequency=spread([sampling.frequency_penalty for _, _, sampling in rows]),
        )

    def _pairs(
        self, rows: Iterable[tuple[int, Sequence[int] | Int64Array]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [N], tokens [N]) of the tokens of each row."""
        listed = list(rows)
        lengths = [len(tokens) for _, tokens in listed]
        row = np.repeat(np.array([row for row, _ in listed], np.int64), lengths)
        tokens = np.concatenate([np.asarray(tokens, np.int64) for _, tokens in listed])
        return self._tensor(row), self._tensor(tokens)

    def _tensor(self, array: "np.ndarray[Any, Any]") -> torch.Tensor:
        return to_device(array, self._device)


def _asks(sampling: Sampling) -> bool:
    return bool(
        sampling.penalises
        or sampling.bad_words
        or sampling.allowed
        or sampling.logit_bias
        or sampling.banned_until
    )

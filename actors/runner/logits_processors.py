"""What changes a row's logits before it is sampled: for the few slots that ask for it.

The order is vLLM's: allowed tokens, bad words, minimum length and bias, penalties. Temperature and
the filters come after (`kernels/sampling`).
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from rayfin.actors.messages import Int32Array, NewRequest, Sampling, SchedulerInfo
from rayfin.kernels.sampling.penalties import apply_penalties

NEVER = float("-inf")


@dataclass(slots=True)
class _Rules:
    """One slot's settings, and what they need to know of its tokens."""

    sampling: Sampling
    forbidden: torch.Tensor | None = None  # [V] bool, the tokens outside ``allowed``
    bias_ids: torch.Tensor | None = None  # [B] int64
    bias: torch.Tensor | None = None  # [B] fp32
    in_prompt: torch.Tensor | None = None  # [V] bool, with penalties
    counts: torch.Tensor | None = None  # [V] int32, of the output, with penalties
    output: list[int] = field(default_factory=list)  # with bad words

    def take(self, token: int) -> None:
        if self.counts is not None:
            self.counts[token] += 1
        if self.sampling.bad_words:
            self.output.append(token)

    def completing(self) -> list[int]:
        """The tokens that would complete a bad word now."""
        output = self.output
        return [
            word[-1]
            for word in self.sampling.bad_words
            if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]
        ]


class LogitsProcessors:
    """The rules of the slots that have some. A slot without any costs nothing."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rules: dict[int, _Rules] = {}

    def __len__(self) -> int:
        return len(self._rules)

    def take_news(self, info: SchedulerInfo) -> None:
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
                rules.take(token)

    def process(
        self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array
    ) -> torch.Tensor:
        """Logits [S, V] of the slots [S], each about to sample the token of its position [S].

        Returns:
            The same tensor where no slot has rules; else a new one, fp32.
        """
        rows = [
            (row, rules)
            for row, slot in enumerate(slots.tolist())
            if (rules := self._rules.get(slot)) is not None
        ]
        if not rows:
            return logits
        changed = logits.float().clone()
        for row, rules in rows:
            _forbid(changed[row], rules, int(positions[row]))
        penalised = [(row, rules) for row, rules in rows if rules.counts is not None]
        if penalised:
            self._penalise(changed, penalised)
        return changed

    def _make(self, new: NewRequest) -> _Rules:
        sampling, device = new.sampling, self._device
        rules = _Rules(sampling)
        if sampling.allowed:
            rules.forbidden = torch.ones(self._vocab_size, dtype=torch.bool, device=device)
            rules.forbidden[list(sampling.allowed)] = False
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            rules.bias_ids = torch.tensor(ids, device=device)
            rules.bias = torch.tensor(values, dtype=torch.float32, device=device)
        if not sampling.needs_history:
            return rules
        assert new.history is not None, "a request that needs its history came without"
        prompt, output = new.history[: new.prompt_len], new.history[new.prompt_len :]
        if sampling.penalises:
            counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
            rules.counts = torch.from_numpy(counts).to(device)
            rules.in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=device)
            rules.in_prompt[torch.from_numpy(prompt.astype(np.int64)).to(device)] = True
        if sampling.bad_words:
            rules.output = output.tolist()
        return rules

    def _penalise(self, logits: torch.Tensor, rows: list[tuple[int, _Rules]]) -> None:
        """All rows with penalties at once, in place."""
        own = [rules.sampling for _, rules in rows]
        index = torch.tensor([row for row, _ in rows], device=self._device)

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device)

        logits[index] = apply_penalties(
            logits[index],
            torch.stack([rules.in_prompt for _, rules in rows if rules.in_prompt is not None]),
            torch.stack([rules.counts for _, rules in rows if rules.counts is not None]),
            repetition=column([sampling.repetition_penalty for sampling in own]),
            presence=column([sampling.presence_penalty for sampling in own]),
            frequency=column([sampling.frequency_penalty for sampling in own]),
        )


def _asks(sampling: Sampling) -> bool:
    return bool(
        sampling.penalises
        or sampling.bad_words
        or sampling.allowed
        or sampling.logit_bias
        or sampling.banned_until
    )


def _forbid(logits: torch.Tensor, rules: _Rules, position: int) -> None:
    """Everything but penalties, on one row [V], in place."""
    if rules.forbidden is not None:
        logits.masked_fill_(rules.forbidden, NEVER)
    if rules.sampling.bad_words and (words := rules.completing()):
        logits[words] = NEVER
    if position < rules.sampling.banned_until:
        logits[list(rules.sampling.banned)] = NEVER
    if rules.bias_ids is not None and rules.bias is not None:
        logits.index_add_(0, rules.bias_ids, rules.bias)

"""What some rows of a lease ask for beside their tokens: rules on logits, log probabilities."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from rayfin.actors.messages import NO_TOKEN, Float32Array, Int32Array, Int64Array, Logprobs
from rayfin.actors.runner.sampling.token_rules import RowTokenRules
from rayfin.actors.runner.step.request_slots import NO_LOGPROBS
from rayfin.kernels.shapes import PER_ENTRY, TokenRules
from rayfin.kernels.staging import staged
from rayfin.kernels.triton.adjust import adjust, count_sampled
from rayfin.kernels.triton.logprobs import MOST_TOP, top_logprobs

MOST_ENTRIES = 1 << 20
"""Tokens in the lists of all rows of a lease (16 MiB): with more, its steps run one by one."""


class GraphExtras:
    """At fixed addresses, as graphs want them; ``load`` fills them in for a lease."""

    def __init__(self, most_rows: int, max_num_steps: int, device: torch.device) -> None:
        kinds = dict.fromkeys(("repetition", "presence", "frequency", "bias"), torch.float32)
        kinds["banned_until"] = torch.int64
        self._rules = TokenRules(
            **{
                field.name: torch.zeros(
                    MOST_ENTRIES if field.name in PER_ENTRY else most_rows,
                    dtype=kinds.get(field.name, torch.int32),
                    device=device,
                )
                for field in fields(TokenRules)
            }
        )
        shape = (most_rows, 1 + MOST_TOP)
        self._asked = torch.full((most_rows,), NO_LOGPROBS, dtype=torch.int32, device=device)
        self._values = torch.zeros(shape, device=device)
        self._numbers = torch.zeros(shape, dtype=torch.int32, device=device)
        self._all_values = torch.zeros(max_num_steps, *shape, device=device)
        self._all_numbers = torch.zeros(max_num_steps, *shape, dtype=torch.int32, device=device)

    @staticmethod
    def fits(rules: RowTokenRules | None, asked: Int64Array) -> bool:
        """Whether the device can do what the rows [R] ask for."""
        listed = rules is None or (rules.entries <= MOST_ENTRIES and not rules.needs_host)
        return listed and bool((asked <= MOST_TOP).all())

    def load(self, rules: RowTokenRules | None, asked: Int64Array, bucket: int) -> None:
        """For the rows of a lease; those of the bucket behind them ask for nothing."""
        rows = len(asked)
        self._asked[:bucket] = NO_LOGPROBS
        device = self._asked.device
        self._asked[:rows].copy_(staged(asked, device), non_blocking=True)
        for field in fields(TokenRules):
            tensor: torch.Tensor = getattr(self._rules, field.name)
            if field.name not in PER_ENTRY:
                tensor[:bucket] = 0
            if rules is not None:
                array = staged(rules.arrays[field.name], device)
                tensor[: len(array)].copy_(array, non_blocking=True)

    def adjust(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A step's logits [B, V] as the rules have them, fp32."""
        return adjust(logits, self._rules.rows(len(logits)), positions)

    def record_logprobs(
        self, logits: torch.Tensor, sampled: torch.Tensor, remaining: torch.Tensor
    ) -> None:
        """Counts the tokens [B] just sampled, and says what the raw logits [B, V] made of them."""
        rows = len(sampled)
        told = self._values[:rows], self._numbers[:rows]
        top_logprobs(logits, sampled, self._asked[:rows], *told)
        count_sampled(sampled, self._rules.rows(rows), remaining)

    def keep(self, step: int) -> None:
        """Puts the log probabilities of a lease's step aside."""
        self._all_values[step].copy_(self._values)
        self._all_numbers[step].copy_(self._numbers)

    def told(self, num_steps: int, asked: Int64Array) -> "GraphLogprobs":
        """What was put aside."""
        rows = slice(len(asked))
        return GraphLogprobs(
            asked,
            self._all_values[:num_steps, rows].cpu().numpy(),
            self._all_numbers[:num_steps, rows].cpu().numpy(),
        )


@dataclass(frozen=True, slots=True)
class GraphLogprobs:
    """Log probabilities of a lease."""

    asked: Int64Array  # [R], as in ``RequestSlots.logprobs``
    values: Float32Array  # [lease, R, 1 + MOST_TOP]
    numbers: Int32Array  # [lease, R, 1 + MOST_TOP]

    def logprobs(self, step: int, rows: Int64Array, tokens: Int32Array) -> Logprobs | None:
        """Those of the ``rows`` [N] that ask and have sampled one of ``tokens`` [N]."""
        at = np.flatnonzero((self.asked[rows] != NO_LOGPROBS) & (tokens >= 0))
        if not len(at):
            return None
        asked = self.asked[rows[at]]
        most = int(asked.max())
        values, numbers = self.values[step, rows[at]], self.numbers[step, rows[at]]
        wanted = np.arange(most) < asked[:, None]
        return Logprobs(
            at=at.astype(np.int32),
            chosen=values[:, 0],
            rank=numbers[:, 0],
            ids=np.where(wanted, numbers[:, 1 : 1 + most], np.int32(NO_TOKEN)),
            values=np.where(wanted, values[:, 1 : 1 + most], np.float32(-np.inf)),
        )

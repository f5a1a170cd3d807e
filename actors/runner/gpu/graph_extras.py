"""Token rules and log probabilities within graphs, for the rows that request them."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from rayfin.actors.messages import NO_TOKEN, Float32Array, Int32Array, Int64Array, Logprobs
from rayfin.actors.runner.request_slots import NO_LOGPROBS
from rayfin.actors.runner.sampling.device_rules import RowTokenRules
from rayfin.kernels.shapes import PER_ENTRY, RuleTensors, staged
from rayfin.kernels.triton.adjust import adjust, count_sampled
from rayfin.kernels.triton.logprobs import MAX_TOP_LOGPROBS, top_logprobs

MAX_ENTRIES = 1 << 20
"""Entries in the lists of all rows (16 MiB); with more, steps run without graphs."""

OUTPUTS = ((1 + MAX_TOP_LOGPROBS, torch.float32), (1 + MAX_TOP_LOGPROBS, torch.int32))
"""Width and dtype of a row's values, and of its numbers: of the token, then of the likeliest."""


class GraphExtras:
    """Inputs and outputs at fixed addresses, which ``load`` fills in for a multi-step call."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        kinds = dict.fromkeys(("repetition", "presence", "frequency", "bias"), torch.float32)
        kinds["banned_until"] = torch.int64
        self._rules = RuleTensors(
            **{
                field.name: torch.zeros(
                    MAX_ENTRIES if field.name in PER_ENTRY else max_rows,
                    dtype=kinds.get(field.name, torch.int32),
                    device=device,
                )
                for field in fields(RuleTensors)
            }
        )
        self._num_logprobs = torch.full((max_rows,), NO_LOGPROBS, dtype=torch.int32, device=device)
        self._outputs = [
            torch.zeros(max_rows, width, dtype=dtype, device=device) for width, dtype in OUTPUTS
        ]

    @staticmethod
    def fits(rules: RowTokenRules | None) -> bool:
        """Whether graphs have room for the rules."""
        return rules is None or rules.entries <= MAX_ENTRIES

    def load(self, rules: RowTokenRules | None, num_logprobs: Int64Array, bucket: int) -> None:
        """Loads the rows of a multi-step call; the bucket's other rows request nothing."""
        rows = len(num_logprobs)
        self._num_logprobs[:bucket] = NO_LOGPROBS
        device = self._num_logprobs.device
        self._num_logprobs[:rows].copy_(staged(num_logprobs, device), non_blocking=True)
        for field in fields(RuleTensors):
            tensor: torch.Tensor = getattr(self._rules, field.name)
            if field.name not in PER_ENTRY:
                tensor[:bucket] = 0
            if rules is not None:
                array = staged(rules.arrays[field.name], device)
                tensor[: len(array)].copy_(array, non_blocking=True)

    def adjust(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Applies the rules to a step's logits [B, V]; the result is fp32."""
        return adjust(logits, self._rules.rows(len(logits)), positions)

    def record_logprobs(
        self, logits: torch.Tensor, sampled: torch.Tensor, remaining: torch.Tensor
    ) -> None:
        """Computes log probabilities from raw logits [B, V], and counts sampled tokens [B]."""
        rows = len(sampled)
        top_logprobs(logits, sampled, self._num_logprobs[:rows], *self.outputs(rows))
        count_sampled(sampled, self._rules.rows(rows), remaining)

    def outputs(self, rows: int) -> list[torch.Tensor]:
        """Returns the values and numbers [rows, W] of a step, which the next step overwrites."""
        return [each[:rows] for each in self._outputs]


@dataclass(frozen=True, slots=True)
class GraphLogprobs:
    """Log probabilities of a multi-step call."""

    num_logprobs: Int64Array  # [R], as in ``RequestSlots.logprobs``
    values: Float32Array  # [num_steps, R, 1 + MAX_TOP_LOGPROBS]
    numbers: Int32Array  # [num_steps, R, 1 + MAX_TOP_LOGPROBS]

    def logprobs(self, step: int, rows: Int64Array, tokens: Int32Array) -> Logprobs | None:
        """Those of the ``rows`` [N] that request them and sampled a token of ``tokens`` [N]."""
        at = np.flatnonzero((self.num_logprobs[rows] != NO_LOGPROBS) & (tokens >= 0))
        if not len(at):
            return None
        num_logprobs = self.num_logprobs[rows[at]]
        width = int(num_logprobs.max())
        values, numbers = self.values[step, rows[at]], self.numbers[step, rows[at]]
        is_requested = np.arange(width) < num_logprobs[:, None]
        return Logprobs(
            at=at.astype(np.int32),
            chosen=values[:, 0],
            rank=numbers[:, 0],
            ids=np.where(is_requested, numbers[:, 1 : 1 + width], np.int32(NO_TOKEN)),
            values=np.where(is_requested, values[:, 1 : 1 + width], np.float32(-np.inf)),
        )

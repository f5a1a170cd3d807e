"""How many tokens of prompts a step may have beside streams, which wait until it is over.

With a fixed number of tokens (Sarathi-Serve) the time between two tokens of a stream depends on the
model, the machine and the contexts. Here that time is chosen, and the number of tokens follows from
the measured time of steps.
"""

from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.step_cost import StepCost

LEAST_TOKENS = 16
"""Prompts get so many tokens of a step even if streams then wait longer than the target."""


class ChunkBudget:
    """Keeps steps with decoding rows within ``target`` seconds; None: as long as they take.

    Args:
        most: tokens of the largest step.
    """

    def __init__(self, target: float | None, most: int) -> None:
        self._target = target
        self._most = most
        self._cost: StepCost | None = None  # until a step has run

    def limit(self, decoding: int, budget: int) -> int:
        """Most of the ``budget`` tokens that prompts may take beside so many decoding rows."""
        if self._target is None or not decoding:
            return budget
        fitting = 0 if self._cost is None else self._cost.tokens(self._target) - decoding
        return min(budget, max(fitting, LEAST_TOKENS))

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """A call has taken the runner ``result.seconds``."""
        if self._target is None or not result.seconds:
            return
        drafted = 0 if result.drafts is None else result.drafts.tokens
        tokens = info.decoding_batch + info.num_prefill_tokens + drafted // result.num_steps
        seconds = result.seconds / result.num_steps
        if self._cost is None:
            self._cost = StepCost.guessed(tokens, seconds, self._most)
        else:
            self._cost.observe(tokens, seconds)

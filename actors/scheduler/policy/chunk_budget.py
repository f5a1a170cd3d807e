"""How many tokens a step may have while somebody waits, or may come, until it is over.

With a fixed number of tokens (Sarathi-Serve) the time between two tokens of a stream depends on the
model, the machine and the contexts. Here that time is chosen, and the number of tokens follows from
the measured time of steps. A step that has only background requests is short in the same way: a
request that arrives waits for it.
"""

import math
from collections.abc import Callable

from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.parts import first_of
from rayfin.actors.speculation import DraftUsage
from rayfin.actors.step_cost import StepCost
from rayfin.actors.timing import BACKGROUND_STEP_SECONDS

LEAST_TOKENS = 16
"""Prompts get so many tokens of a step even if streams then wait longer than the target."""

SHORTEST_STEPS = 3
"""A step of background requests may take as long as so many of the shortest one that has run. Where
that is more than ``BACKGROUND_STEP_SECONDS``, smaller steps would only read the weights more often.
"""


class ChunkBudget:
    """Keeps steps with decoding rows within ``target`` seconds; None: as long as they take.

    Args:
        most: tokens of the largest step.
        only_background: whether no request in the foreground runs or waits; such steps are kept
            within ``BACKGROUND_STEP_SECONDS`` as well.
    """

    def __init__(
        self,
        target: float | None,
        max_tokens: int,
        only_background: Callable[[], bool] = lambda: False,
    ) -> None:
        self._target = target
        self._max_tokens = max_tokens
        self._only_background = only_background
        self._cost: StepCost | None = None  # until a step has run
        self._last_seconds = 0.0  # of a step that was observed
        self._shortest = math.inf  # seconds of any step
        self._half = 0  # tokens of the last one, if it took under half of a background step's time

    @property
    def alone(self) -> bool:
        """Whether no step should wait behind the one that runs.

        It has background requests alone, and takes long: a second one would double the wait of a
        request that arrives, and gain little.
        """
        return self._last_seconds > BACKGROUND_STEP_SECONDS / 4 and self._only_background()

    def limit(self, decoding: int, budget: int) -> int:
        """Most of the ``budget`` tokens that prompts may take beside so many decoding rows."""
        if self._target is not None and decoding:
            fitting = 0 if self._cost is None else self._cost.tokens(self._target) - decoding
            budget = min(budget, max(fitting, LEAST_TOKENS))
        if self._only_background():
            budget = min(budget, max(self._background_tokens() - decoding, LEAST_TOKENS))
        return budget

    def takes_background(self, rows: int) -> bool:
        """Whether steps stay short with one more background request beside so many rows of one."""
        if self._cost is None:
            return True
        return rows < max(self._background_tokens() - LEAST_TOKENS, LEAST_TOKENS)

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """A call has taken the runner ``result.seconds``."""
        if not result.seconds or (self._target is None and not self._only_background()):
            return
        drafts = first_of(result.usage, DraftUsage)
        drafted = 0 if drafts is None else drafts.tokens
        tokens = info.decoding_batch + info.num_prefill_tokens + drafted // result.num_steps
        self._last_seconds = seconds = result.seconds / result.num_steps
        if self._cost is None:
            self._cost = StepCost.guessed(tokens, seconds, self._max_tokens)
        else:
            self._cost.observe(tokens, seconds)
        self._shortest = min(self._shortest, seconds)
        self._half = tokens if 2 * seconds < self._background_seconds else 0

    @property
    def _background_seconds(self) -> float:
        return max(BACKGROUND_STEP_SECONDS, SHORTEST_STEPS * self._shortest)

    def _background_tokens(self) -> int:
        """Most tokens of a step of background requests.

        Twice those of a quick step in any case: a table that a slow first step has drawn learns of
        larger steps only from steps that are larger.
        """
        if self._cost is None:
            return 0
        return max(self._cost.tokens(self._background_seconds), 2 * self._half)

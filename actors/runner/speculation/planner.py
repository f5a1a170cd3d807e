"""How many drafts each row gets: as many as make the most tokens a second, or none.

A step of more tokens takes longer, and a draft is right with some chance. Each draft is worth the
chance that it and all before it are right; the best of all rows go in as long as the step gains
more tokens than time. A guard watches what came of it. (vLLM and SGLang choose by tables of batch
sizes.)
"""

import time
from collections.abc import Callable

import numpy as np

from rayfin.actors.messages import Int64Array
from rayfin.actors.runner.speculation.interface import TRUST_CLASSES, Drafts
from rayfin.actors.step_cost import StepCost
from rayfin.actors.timing import (
    DRAFT_PAUSE_SECONDS,
    DRAFT_WINDOW_SECONDS,
    MAX_DRAFT_PAUSE_SECONDS,
)

PRIOR = np.array([0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9])
"""Chance that a draft of each class is right, before any was seen ..."""

DRAFTED_PRIOR = 0.7
"""The same of a draft model, over all classes."""

PRIOR_DRAFTS = 3.0
"""... which counts as much as so many drafts."""

REMEMBERED = 256.0
"""Drafts of a class and place that count; older ones fade."""

FADING = 0.998
"""Of what is known of classes that get no draft, in each step: one day they are tried again."""

OWN_DRAFTS = 32.0
"""Drafts of a request by which it is judged to be better or worse than others."""

FASTER = 0.7
"""A pause ends where a plain step takes no more than so much of what it took within it."""

LEAST_GAIN = 1.02
LEAST_RATE = 0.98
"""Steps with drafts stop for a while if they give fewer tokens a second than so much of the rate
of plain ones."""


class DraftPlanner:
    """Chances of drafts by class and place, the table of step times, and the guard.

    Args:
        draft_seconds: of one draft of each of so many rows; None: drafts cost no time to speak of.
    """

    def __init__(
        self,
        num_slots: int,
        max_drafts: int,
        cost: StepCost,
        *,
        adaptive: bool = True,
        follow: bool = True,
        draft_seconds: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_drafts = max_drafts
        self.cost = cost  # of a step, as it has turned out
        self._adaptive = adaptive
        self._follow = follow  # times: not where ranks must decide alike
        self._draft_seconds = draft_seconds
        self._clock = clock
        self._right = np.zeros((TRUST_CLASSES, max_drafts))  # by class and place ...
        self._tried = np.zeros((TRUST_CLASSES, max_drafts))  # ... where all before were right
        self._own = np.zeros((num_slots, 2))  # right drafts of a slot, and how many were expected
        self._picked: tuple[Int64Array, np.ndarray] | None = None  # classes, and expected drafts
        self._plain = self._spent = 0.0  # seconds: of plain steps for the same tokens; taken
        self._pause = DRAFT_PAUSE_SECONDS
        self._paused_until = 0.0
        self._slowest = 0.0  # seconds of a plain step, in the pause

    def add(self, slot: int) -> None:
        """A new request is in the slot."""
        self._own[slot] = 0

    def room(self, left: Int64Array, tokens: int, decoding: int, budget: int) -> Int64Array:
        """Most drafts [N] for rows that may sample ``left`` [N] more tokens than one.

        Args:
            tokens: of the step without drafts, of which ``decoding`` are decoding rows.
            budget: drafts of all rows at most.
        """
        if self._adaptive and self._follow and self._clock() < self._paused_until:
            return np.zeros_like(left)
        limit, rows = self._max_drafts, len(left)
        if self._draft_seconds is not None:
            limit = min(limit, max(budget // rows, 1))
            if self._adaptive:
                limit = self._depth(rows, limit, tokens, decoding, self._draft_seconds(rows))
        room: Int64Array = np.minimum(left, limit)
        return room

    def _depth(self, rows: int, limit: int, tokens: int, decoding: int, seconds: float) -> int:
        """How many drafts of each of the ``rows`` to ask for, each of which costs ``seconds``."""
        right, tried = self._right.sum(axis=0), self._tried.sum(axis=0)
        chances = (right + DRAFTED_PRIOR * PRIOR_DRAFTS) / (tried + PRIOR_DRAFTS)
        counts = np.arange(limit + 1)
        gained = np.concatenate([[0.0], np.cumsum(np.cumprod(chances[:limit]))])
        rates = (decoding + rows * gained) / (
            self.cost.seconds(tokens + rows * counts) + counts * seconds
        )
        best = int(rates.argmax())
        if best and rates[best] >= LEAST_GAIN * rates[0]:
            return best
        self._fade(np.arange(TRUST_CLASSES))
        return 0

    def pick(
        self, slots: Int64Array, drafts: Drafts, tokens: int, decoding: int, budget: int
    ) -> Int64Array:
        """How many of its drafts [N] each of the slots [N] gets, ``budget`` in all at most."""
        lengths: Int64Array = drafts.lengths
        if not lengths.any():
            return lengths
        if not self._adaptive:
            within: Int64Array = np.clip(budget - (np.cumsum(lengths) - lengths), 0, lengths)
            return within
        classes = np.zeros(len(slots), np.int64) if drafts.trust is None else drafts.trust
        accuracy = (self._own[slots, 0] + 2) / (self._own[slots, 1] + 2)
        chances = np.minimum(self._chances()[classes] * np.minimum(accuracy, 1.2)[:, None], 0.98)
        survival = np.cumprod(chances, axis=1)
        survival[np.arange(self._max_drafts) >= lengths[:, None]] = 0
        ranked = np.sort(survival, axis=None)[::-1][:budget]
        counts = np.arange(len(ranked) + 1)
        gains = decoding + np.concatenate([[0.0], np.cumsum(ranked)])
        rates = gains / self.cost.seconds(tokens + counts)
        best = int(rates.argmax())
        if not best or rates[best] < LEAST_GAIN * rates[0]:
            self._fade(np.unique(classes[lengths > 0]))
            return np.zeros_like(lengths)
        picked: Int64Array = (survival >= ranked[best - 1]).sum(axis=1)
        picked = np.clip(best - (np.cumsum(picked) - picked), 0, picked)  # of equals the first
        drafting = picked > 0
        self._picked = (classes[drafting], survival[drafting])
        return picked

    def learn(self, slots: Int64Array, drafted: Int64Array, right: Int64Array) -> None:
        """Of the drafts [N] of the slots [N], the first ``right`` [N] were.

        The slots are those of the last ``pick`` that got drafts.
        """
        if self._picked is None:
            return
        classes, survival = self._picked
        place = np.arange(self._max_drafts)
        reached = place <= np.minimum(right, drafted - 1)[:, None]
        np.add.at(self._tried, classes, reached)
        np.add.at(self._right, classes, place < right[:, None])
        over = np.maximum(self._tried / REMEMBERED, 1)
        self._tried /= over
        self._right /= over
        expected = np.where(place < drafted[:, None], survival, 0).sum(axis=1)
        fading = np.maximum(1 - drafted / OWN_DRAFTS, 0)[:, None]
        self._own[slots] = self._own[slots] * fading + np.stack([right, expected], axis=1)

    def observe(
        self,
        tokens: int,
        drafts: int,
        decoding: int,
        sampled: int,
        seconds: float,
        drafting: float = 0.0,
    ) -> None:
        """A step without prompts took ``seconds``; its decoding rows sampled so many tokens.

        Args:
            drafting: seconds that its drafts took before it.
        """
        if not (self._adaptive and self._follow):
            return
        self.cost.observe(tokens, seconds)
        if not drafts and not drafting:
            self._end_early(float(self.cost.seconds(1)))
            return
        self._plain += sampled / decoding * float(self.cost.seconds(decoding))
        self._spent += seconds + drafting
        if self._spent < DRAFT_WINDOW_SECONDS:
            return
        if self._plain < LEAST_RATE * self._spent:
            self._paused_until = self._clock() + self._pause
            self._pause = min(2 * self._pause, MAX_DRAFT_PAUSE_SECONDS)
            self._slowest = 0.0
        else:
            self._pause = DRAFT_PAUSE_SECONDS
        self._plain = self._spent = 0.0

    def _end_early(self, seconds: float) -> None:
        """Ends a pause when plain steps are fast again: the machine was busy."""
        self._slowest = max(self._slowest, seconds)
        if seconds < FASTER * self._slowest:
            self._paused_until, self._pause, self._slowest = 0.0, DRAFT_PAUSE_SECONDS, seconds

    def _chances(self) -> np.ndarray:
        """[classes, places] that a draft is right if all before it are."""
        prior = PRIOR[:, None] * PRIOR_DRAFTS
        chances: np.ndarray = (self._right + prior) / (self._tried + PRIOR_DRAFTS)
        return chances

    def _fade(self, classes: Int64Array) -> None:
        self._right[classes] *= FADING
        self._tried[classes] *= FADING

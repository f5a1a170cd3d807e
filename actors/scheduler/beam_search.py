"""Beam search over one prompt, apart from any engine: log probabilities in, decisions out.

The rules are those of transformers' ``generate(num_beams=width, num_return_sequences=width)``:

- the ``width`` likeliest continuations of all running beams that do not end the text continue;
- one that ends it (by a stop token or at ``max_tokens``) becomes a hypothesis if it is among the
  ``width`` likeliest of all; hypotheses are ranked by score / length ** length_penalty;
- the search is over when the best running beam can no longer beat the worst of ``width``
  hypotheses, by an estimate that ``early_stopping`` picks.
"""

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from rayfin.actors.messages import BeamParams, Float32Array, Hypothesis, Int32Array


@dataclass(slots=True, frozen=True)
class Continuation:
    """The running beams after a step: beam i continues ``parents[i]`` with ``tokens[i]``."""

    parents: list[int]  # indices of the beams before; one may occur several times or never
    tokens: list[int]


def candidates_per_beam(width: int, num_stops: int) -> int:
    """How many of each beam's likeliest tokens ``BeamSearch`` needs: width + number of stops.

    A step needs two things of the order of all continuations: its first ``width``, and the first
    ``width`` that do not end. Each of the first kind is, in its own beam, behind fewer than
    ``width`` others. Each of the second kind is behind fewer than ``width`` of the same beam that
    do not end, and behind no more than ``num_stops`` that do. So neither is ever further down in
    its beam than this. (transformers ranks the first max(2, 1 + num_stops) x width of the joint
    vocabulary, which contain both by the same count.)
    """
    return width + num_stops


class BeamSearch:
    """The search over one prompt's continuations.

    It starts with one beam, the prompt itself. Equal scores: the beam that ranks higher goes first,
    then the token that its row names first (torch, and so transformers, promises no order). Sums
    are float32 as transformers' are. Where the first step has fewer than ``width`` tokens that do
    not end, there are fewer beams than ``width``, and possibly fewer hypotheses.

    Args:
        params: width, length penalty, early stopping; a search of width 1 is greedy decoding.
        stop_token_ids: tokens that end a hypothesis; they are part of it.
        max_tokens: most tokens of a hypothesis.
    """

    def __init__(self, params: BeamParams, stop_token_ids: Set[int], max_tokens: int) -> None:
        self.over = False
        self.beams: list[list[int]] = [[]]  # tokens of the running ones, likeliest first
        self.hypotheses: list[Hypothesis] = []  # best first
        self._scores: Float32Array = np.zeros(1, np.float32)  # of the beams, not normalised
        self._width = params.width
        self._penalty = params.length_penalty
        self._early_stopping = True if params.width == 1 else params.early_stopping
        self._stops = stop_token_ids
        self._max_tokens = max_tokens

    def advance(self, ids: Int32Array, logprobs: Float32Array) -> Continuation:
        """One step: ``ids`` and ``logprobs`` [B, K] are the B beams' likeliest tokens, in order.

        K is at least ``candidates_per_beam``, or the whole vocabulary.

        Returns:
            The continuation; empty when the search is over.
        """
        scores = (self._scores[:, None] + logprobs.astype(np.float32)).ravel()
        order = np.argsort(-scores, kind="stable").tolist()
        tokens, num_candidates = ids.ravel().tolist(), ids.shape[1]
        length = len(self.beams[0]) + 1
        full = length >= self._max_tokens
        ended = [i for i in order[: self._width] if full or tokens[i] in self._stops]
        running = [] if full else [i for i in order if tokens[i] not in self._stops][: self._width]
        self._keep([(self.beams[i // num_candidates], tokens[i], scores[i]) for i in ended])
        self.beams = [[*self.beams[i // num_candidates], tokens[i]] for i in running]
        self._scores = scores[running]
        self.over = not running or self._cannot_improve(length)
        if self.over:
            return Continuation([], [])
        return Continuation([i // num_candidates for i in running], [tokens[i] for i in running])

    def _keep(self, ended: list[tuple[list[int], int, np.float32]]) -> None:
        """The best ``width`` of the hypotheses and those (beam, token, score) that ``ended``."""
        for beam, token, score in ended:
            normalised = float(score / np.float32((len(beam) + 1) ** self._penalty))
            reason = "stop" if token in self._stops else "length"
            self.hypotheses.append(Hypothesis([*beam, token], normalised, reason))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self._width :]

    def _cannot_improve(self, length: int) -> bool:
        """Whether by the rule no beam of ``length`` tokens can become a better hypothesis."""
        if len(self.hypotheses) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._penalty > 0:
            length = self._max_tokens  # a later end would raise the score
        best = float(self._scores[0] / np.float32(length**self._penalty))
        return best <= self.hypotheses[-1].score

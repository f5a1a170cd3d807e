"""The different tokens of one request, with how often it has generated each."""

import numpy as np

from rayfin.actors.messages import Int32Array, Int64Array

GROWTH = 64  # places; there are twice as many when they run out


class UsedByRequest:
    """Grows by a token at a time, and is read as arrays at each step."""

    def __init__(self, prompt: Int32Array, output: Int32Array) -> None:
        tokens, first = np.unique(np.concatenate([prompt, output]), return_inverse=True)
        self._tokens: Int64Array = np.zeros(len(tokens) + GROWTH, np.int64)
        self._counts: Int64Array = np.zeros(len(tokens) + GROWTH, np.int64)
        self._tokens[: len(tokens)] = tokens
        np.add.at(self._counts, first[len(prompt) :], 1)
        self._place = {token: i for i, token in enumerate(tokens.tolist())}

    def __len__(self) -> int:
        return len(self._place)

    @property
    def tokens(self) -> Int64Array:
        """[N], in no order."""
        return self._tokens[: len(self)]

    @property
    def counts(self) -> Int64Array:
        """[N] how often each was generated: 0 for one of the prompt alone."""
        return self._counts[: len(self)]

    def add(self, token: int) -> None:
        """The token was generated."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            more = np.zeros(len(self._tokens), np.int64)
            self._tokens = np.concatenate([self._tokens, more])
            self._counts = np.concatenate([self._counts, more])
        self._tokens[place] = token
        self._counts[place] += 1

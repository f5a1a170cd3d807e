"""A step's output: collected per client, sent as one message each."""

from collections import Counter

import numpy as np

from rayfin.actors.messages import (
    Begun,
    BoolArray,
    Ended,
    Int32Array,
    Int64Array,
    Logprobs,
    StepResult,
    TokenDeltas,
)


class Outbox:
    """Collects one step's tokens, log probabilities and ends."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[tuple[Int64Array, Int32Array]]] = {}
        self._count: Counter[str] = Counter()  # tokens of each client
        self._logprobs: dict[str, list[Logprobs]] = {}
        self._prompts: dict[str, dict[int, Logprobs]] = {}
        self._ended: dict[str, list[Ended]] = {}
        self._begun: dict[str, dict[int, Begun]] = {}

    @property
    def has_output(self) -> bool:
        """Whether something waits for ``drain``."""
        return bool(self._tokens or self._ended or self._prompts)

    def tokens(
        self, client: str, keys: Int64Array, tokens: Int32Array, logprobs: Logprobs | None = None
    ) -> None:
        """Adds tokens [N] of the client's requests ``keys`` [N], in order for each request.

        ``logprobs`` refers to them by index in ``tokens``.
        """
        if logprobs is not None and len(logprobs.at):
            shifted = logprobs.renumbered(np.arange(len(tokens)) + self._count[client])
            self._logprobs.setdefault(client, []).append(shifted)
        self._count[client] += len(tokens)
        self._tokens.setdefault(client, []).append((keys, tokens))

    def prompt(self, client: str, key: int, logprobs: Logprobs) -> None:
        """Adds prompt log probabilities of the client's request ``key``."""
        self._prompts.setdefault(client, {})[key] = logprobs

    def begin(self, client: str, key: int, begun: Begun) -> None:
        """Adds what is known of the client's request ``key``, which has its first token."""
        self._begun.setdefault(client, {})[key] = begun

    def end(self, client: str, ended: Ended) -> None:
        self._ended.setdefault(client, []).append(ended)

    def drain(self, epoch: int, step: int) -> dict[str, TokenDeltas]:
        """Removes and returns the messages by client."""
        messages = {
            client: self._message(client, epoch, step)
            for client in self._tokens.keys() | self._ended.keys() | self._prompts.keys()
        }
        self._tokens, self._logprobs, self._prompts, self._ended = {}, {}, {}, {}
        self._begun = {}
        self._count.clear()
        return messages

    def _message(self, client: str, epoch: int, step: int) -> TokenDeltas:
        keys, tokens = _joined(self._tokens.get(client, []))
        logprobs = self._logprobs.get(client)
        return TokenDeltas(
            epoch,
            step,
            keys,
            tokens,
            self._ended.get(client, []),
            Logprobs.joined(logprobs) if logprobs else None,
            self._prompts.get(client, {}),
            self._begun.get(client, {}),
        )


def _joined(parts: list[tuple[Int64Array, Int32Array]]) -> tuple[Int64Array, Int32Array]:
    if len(parts) == 1:
        return parts[0]
    keys = [np.zeros(0, np.int64), *(keys for keys, _ in parts)]
    tokens = [np.zeros(0, np.int32), *(tokens for _, tokens in parts)]
    return np.concatenate(keys), np.concatenate(tokens)


def compacted(rows: BoolArray) -> Int64Array:
    """The index [N] of each row among the picked ``rows`` [N]; -1 for the others."""
    return np.where(rows, np.cumsum(rows) - 1, -1)


def column_logprobs(result: StepResult, column: int, rows: BoolArray) -> Logprobs | None:
    """Log probabilities of one step of the call, by index among the picked ``rows`` [R]."""
    if result.logprobs is None:
        return None
    to = np.full(result.tokens.shape, -1, np.int64)
    to[:, column] = compacted(rows)
    return result.logprobs.renumbered(to.reshape(-1))

"""What a step has to tell: gathered per client, sent as one message each."""

import numpy as np

from rayfin.actors.messages import Ended, Int32Array, Int64Array, TokenDeltas


class Outbox:
    """Collects one step's news."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[tuple[Int64Array, Int32Array]]] = {}
        self._ended: dict[str, list[Ended]] = {}

    def tokens(self, client: str, keys: Int64Array, tokens: Int32Array) -> None:
        """Tokens [N] of the client's requests ``keys`` [N]; a request's own come in order."""
        self._tokens.setdefault(client, []).append((keys, tokens))

    def end(self, client: str, ended: Ended) -> None:
        self._ended.setdefault(client, []).append(ended)

    def take(self, epoch: int, step: int) -> dict[str, TokenDeltas]:
        """The messages by client; the box is empty afterwards."""
        messages = {
            client: TokenDeltas(
                epoch, step, *_joined(self._tokens.get(client, [])), self._ended.get(client, [])
            )
            for client in self._tokens.keys() | self._ended.keys()
        }
        self._tokens, self._ended = {}, {}
        return messages


def _joined(parts: list[tuple[Int64Array, Int32Array]]) -> tuple[Int64Array, Int32Array]:
    if len(parts) == 1:
        return parts[0]
    keys = [np.zeros(0, np.int64), *(keys for keys, _ in parts)]
    tokens = [np.zeros(0, np.int32), *(tokens for _, tokens in parts)]
    return np.concatenate(keys), np.concatenate(tokens)

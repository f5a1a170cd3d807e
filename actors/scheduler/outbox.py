"""What a step has to tell: gathered per client, sent as one message each."""

import numpy as np

from rayfin.actors.messages import Ended, Int32Array, Int64Array, TokenDeltas


class Outbox:
    """Collects one step's news."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[Int64Array, Int32Array]] = {}
        self._ended: dict[str, list[Ended]] = {}

    def tokens(self, client: str, keys: Int64Array, tokens: Int32Array) -> None:
        """Tokens [N] of the client's requests ``keys`` [N]; once per client and step."""
        self._tokens[client] = (keys, tokens)

    def end(self, client: str, ended: Ended) -> None:
        self._ended.setdefault(client, []).append(ended)

    def take(self, epoch: int, step: int) -> dict[str, TokenDeltas]:
        """The messages by client; the box is empty afterwards."""
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int32)
        messages = {
            client: TokenDeltas(
                epoch, step, *self._tokens.get(client, nothing), self._ended.get(client, [])
            )
            for client in self._tokens.keys() | self._ended.keys()
        }
        self._tokens, self._ended = {}, {}
        return messages

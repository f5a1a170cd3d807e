"""Splits a step's message into one delta per request, or gathers messages until a request ends."""

from collections.abc import Iterator, Mapping

from rayfin.actors.messages import Ended, TokenDelta, TokenDeltas


def split_deltas(
    message: TokenDeltas, request_ids: Mapping[int, str]
) -> Iterator[tuple[int, TokenDelta]]:
    """Yields (key, delta) for every request of ``request_ids`` that the message mentions.

    A request that ended in an error has no delta: the caller raises its error.
    """
    ended = {end.key: end for end in message.ended}
    keys = message.keys.tolist()
    deltas = {
        key: TokenDelta(request_ids[key], [], weights=message.weights)
        for key in {*keys, *ended, *message.prompt_logprobs}
        if key in request_ids and (key not in ended or ended[key].error is None)
    }
    for key, token in zip(keys, message.tokens.tolist(), strict=True):
        if key in deltas:
            deltas[key].tokens.append(token)
    _add_logprobs(message, deltas)
    for key in message.kept & deltas.keys():
        deltas[key].kept = True
    for key, begun in message.begun.items():
        if (first := deltas.get(key)) is not None:
            first.queued, first.first_token, first.cached_tokens = begun
    for key, delta in deltas.items():
        if (end := ended.get(key)) is not None:
            _end(delta, end)
        yield key, delta


class WholeDeltas:
    """Gathers the tokens of requests that are read whole: one delta for each, at its end.

    A step then costs these requests no objects. They have no log probabilities.
    """

    def __init__(self, request_ids: Mapping[int, str]) -> None:
        self._deltas = {key: TokenDelta(request_id, []) for key, request_id in request_ids.items()}
        self._tokens = {key: delta.tokens for key, delta in self._deltas.items()}

    def add(self, key: int, request_id: str) -> None:
        """Adds a request, of which no token has come."""
        self._deltas[key] = delta = TokenDelta(request_id, [])
        self._tokens[key] = delta.tokens

    def drop(self, key: int) -> TokenDelta | None:
        """Forgets a request; returns its tokens so far, None if it is not gathered."""
        self._tokens.pop(key, None)
        return self._deltas.pop(key, None)

    def begun(self) -> list[int]:
        """The keys of the requests that have tokens."""
        return [key for key, tokens in self._tokens.items() if tokens]

    def push(self, message: TokenDeltas) -> Iterator[tuple[int, TokenDelta]]:
        """Yields (key, delta) for the requests that end, but those that end in an error."""
        gathered = self._tokens
        for key, token in zip(message.keys.tolist(), message.tokens.tolist(), strict=True):
            if (tokens := gathered.get(key)) is not None:
                tokens.append(token)
        for end in message.ended:
            delta = self.drop(end.key)
            if delta is not None and end.error is None:
                delta.weights = message.weights
                _end(delta, end)
                yield end.key, delta


def _end(delta: TokenDelta, end: Ended) -> None:
    delta.finish_reason, delta.stop_reason = end.finish_reason, end.stop_reason
    delta.cached_tokens = end.cached_tokens
    delta.hypotheses, delta.queued = end.hypotheses, end.queued
    delta.first_token, delta.vector = end.first_token, end.vector


def _add_logprobs(message: TokenDeltas, deltas: Mapping[int, TokenDelta]) -> None:
    for key, logprobs in message.prompt_logprobs.items():
        if key in deltas:
            deltas[key].prompt_logprobs = dict(logprobs.entries())
    if message.logprobs is None:
        return
    for at, entry in message.logprobs.entries():  # in the order of the tokens
        if (delta := deltas.get(int(message.keys[at]))) is not None:
            delta.logprobs = [*(delta.logprobs or []), entry]

"""A step's message, taken apart by request."""

from collections.abc import Iterator, Mapping

from rayfin.actors.messages import TokenDelta, TokenDeltas


def split_deltas(
    message: TokenDeltas, request_ids: Mapping[int, str]
) -> Iterator[tuple[int, TokenDelta]]:
    """(key, delta) of every request of ``request_ids`` that the message has news of.

    A request that ended in an error has no delta: its error is the client's to raise.
    """
    ended = {end.key: end for end in message.ended}
    tokens: dict[int, list[int]] = {}
    for key, token in zip(message.keys.tolist(), message.tokens.tolist(), strict=True):
        tokens.setdefault(key, []).append(token)
    for key in tokens.keys() | ended.keys():
        end = ended.get(key)
        if key in request_ids and (end is None or end.error is None):
            delta = TokenDelta(request_ids[key], tokens.get(key, []))
            if end is not None:
                delta.finish_reason, delta.stop_reason = end.finish_reason, end.stop_reason
                delta.cached_tokens = end.cached_tokens
            yield key, delta

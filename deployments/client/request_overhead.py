"""The time of a request between ingress and engine, measured without a common clock."""

from rayfin.actors.messages import TokenDelta


class RequestOverheadTimer:
    """One request at one engine; ``sent`` in seconds of the ingress' clock.

    The engine's last message has its own time to the first token. The ingress subtracts that from
    its own: the rest is the way there, the wait for the engine's loop, and the way back. As in NTP,
    durations of two clocks are compared, never times.
    """

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._first: float | None = None

    def observe(self, delta: TokenDelta, now: float) -> float | None:
        """Records a delta that arrived at ``now``; returns the seconds at the last one, or None."""
        if self._first is None and delta.tokens:
            self._first = now
        if self._first is None or delta.finish_reason is None or delta.first_token is None:
            return None
        return max(0.0, self._first - self._sent - delta.first_token)

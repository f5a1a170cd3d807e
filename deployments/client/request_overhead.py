"""How long a request was on its way between ingress and engine, without a clock in common."""

from rayfin.actors.messages import TokenDelta


class RequestOverheadTimer:
    """One request at one engine; ``sent`` in seconds of the ingress' clock.

    The engine tells in its last message how long it had the request until the first token; what the
    ingress has waited over that was the way there, until the engine's loop took the request in
    between two steps, and the way back. The idea is NTP's: durations of two clocks, no times.
    """

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._first: float | None = None

    def observe(self, delta: TokenDelta, now: float) -> float | None:
        """News that came at ``now``; with the last one, the seconds on the way if known."""
        if self._first is None and delta.tokens:
            self._first = now
        if self._first is None or delta.finish_reason is None or delta.first_token is None:
            return None
        return max(0.0, self._first - self._sent - delta.first_token)

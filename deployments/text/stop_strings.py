"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first; holds back only text that may become one.

    Of two that end at the same character the longer one wins. The result does not depend on how the
    text is split.

    Args:
        stops: non-empty strings.
        include: the text ends with the stop string instead of before it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include
        self._held = ""  # the longest end of the text that is the start of a stop string

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Returns the text that is safe to emit, and the stop string that was found or None.

        ``armed=False`` lets stop strings that are complete within ``text`` pass.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        hit = self._first_hit(buffer, len(self._held)) if armed else None
        if hit is not None:
            start, stop = hit
            self._held = ""
            return buffer[: start + len(stop) if self._include else start], stop
        safe = len(buffer) - self._open_length(buffer)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def flush(self) -> str:
        """Returns the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, buffer: str, seen: int) -> tuple[int, str] | None:
        """Returns the start of the first stop string that ends after ``seen``, and the string."""
        best: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _open_length(self, buffer: str) -> int:
        """Returns the length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest

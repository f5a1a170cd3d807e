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
        self._matches = [_Match(stop) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""  # the longest end of the text that is the start of a stop string

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Returns the text that is safe to emit, and the stop string that was found or None.

        ``armed=False`` lets stop strings that are complete within ``text`` pass.
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            whole = [match.stop for match in self._matches if match.push(char)]
            if whole and armed:
                stop = max(whole, key=len)
                self.flush()
                return buffer[: end if self._include else end - len(stop)], stop
        safe = len(buffer) - max(match.length for match in self._matches)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def flush(self) -> str:
        """Returns the text held back, at the end of the text."""
        held, self._held = self._held, ""
        for match in self._matches:
            match.length = 0
        return held


class _Match:
    """How much of one stop string a text ends with (Knuth, Morris and Pratt, 1977).

    Each character takes constant time on average, however long the string is.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0  # of the text's longest end that is a start of the string, not all of it
        # Of each start of the string the same, for itself; as far as a text has come.
        self._shorter = [0]

    def push(self, char: str) -> bool:
        """Appends a character; returns whether the string is whole with it."""
        stop, length = self.stop, self.length
        if not length and char != stop[0]:
            return False
        while length and stop[length] != char:
            length = self._shorter[length - 1]
        length += stop[length] == char
        if length > len(self._shorter):
            self._shorter.append(self._next())
        is_whole = length == len(stop)
        self.length = self._shorter[-1] if is_whole else length
        return is_whole

    def _next(self) -> int:
        """The entry behind those that are known."""
        stop, shorter = self.stop, self._shorter
        char, length = stop[len(shorter)], shorter[-1]
        while length and stop[length] != char:
            length = shorter[length - 1]
        return length + (stop[length] == char)

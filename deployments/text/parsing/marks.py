"""Marks in a text that arrives in pieces, and the text that waits to be read.

A marker token becomes one character that no text has, so that it is not confused with a text that
looks like it. All decisions depend on the text so far, never on how it was cut: of two marks the
one that starts first counts, then the longer one, and text that may become a mark is held back.
"""

import itertools
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import NamedTuple, TypeVar

from rayfin.deployments.text.parsing.events import EventKind, EventWriter, Piece

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads from a feed; waits in ``yield`` for more of the text; returns T."""

MAX_HELD = 1 << 20
"""Characters of a call that are held until its name is known, or of one held value."""

HELD_BLANKS = 64

JSON_UNSAFE = '"\\\\\\x00-\\x1f'
"""Characters, as a class in a pattern, that are escaped in a JSON string."""

_FIRST_MARKER = 0xDC00  # lone surrogates: a detokenizer emits whole characters only
_MARKER = re.compile("[\ud800-\udfff]")
_BLANKS = re.compile(r"[ \t\r\n]*")
_NEWLINES = re.compile(r"\n*")


class Markers:
    """Writes marker tokens as characters, and back.

    Args:
        marks: texts that may be tokens.
        tokens: those that also occur within longer marks.
        special: those that are never spelled by other tokens; text that looks like one stays text.
    """

    def __init__(
        self, marks: Iterable[str], tokens: Collection[str] = (), special: Collection[str] = ()
    ) -> None:
        texts = dict.fromkeys(mark for mark in (*marks, *sorted(tokens)) if len(mark) > 2)
        self.chars = {text: chr(_FIRST_MARKER + i) for i, text in enumerate(texts)}
        self.texts = {char: text for text, char in self.chars.items()}
        self._special = frozenset(special)
        self._sets: dict[tuple[str, ...], MarkSet] = {}
        parts = sorted(tokens, key=len, reverse=True)
        self._parts = re.compile("|".join(map(re.escape, parts)) if parts else "(?!)")

    def encode(self, piece: Piece) -> str:
        """Returns the text of a piece with a character for a known marker."""
        if piece.marker:
            return self.chars.get(piece.marker, piece.marker)
        text = piece.text
        return text if text.isascii() else _MARKER.sub("\ufffd", text)

    def decode(self, text: str) -> str:
        """Returns the text with the texts of its markers."""
        if text.isascii():
            return text
        return _MARKER.sub(lambda match: self.texts.get(match[0], "\ufffd"), text)

    def marks(self, *texts: str) -> "MarkSet":
        """Returns the set of these marks, in all forms; empty texts are left out."""
        known = self._sets.get(texts)
        if known is None:
            forms = {form: text for text in texts if text for form in self._forms(text)}
            known = self._sets[texts] = MarkSet(forms)
        return known

    def _forms(self, mark: str) -> list[str]:
        """Returns what a mark may arrive as: a token, text, or tokens with text between."""
        forms = [self.chars[mark]] if mark in self.chars else []
        if mark in self._special:
            return forms
        choices: list[tuple[str, ...]] = []
        start = 0
        for match in self._parts.finditer(mark):
            choices += [(mark[start : match.start()],), self._spellings(match[0])]
            start = match.end()
        choices.append((mark[start:],))
        return forms + ["".join(choice) for choice in itertools.product(*choices)]

    def _spellings(self, token: str) -> tuple[str, ...]:
        char = self.chars.get(token, token)
        return (char,) if token in self._special else (char, token)


class Found(NamedTuple):
    """The end of what is no mark; then a mark, or "" and text that may become one."""

    start: int
    mark: str = ""
    end: int = 0


class MarkSet:
    """Finds the first of some marks.

    Args:
        forms: what each mark may look like in the text, and the mark.
    """

    def __init__(self, forms: Mapping[str, str]) -> None:
        self._forms = dict(forms)
        ordered = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else "(?!)")
        self._beginnings = frozenset(form[:i] for form in forms for i in range(1, len(form)))
        self.first = "".join(sorted({form[0] for form in forms}))
        self._starts = re.compile(f"[{re.escape(self.first)}]" if ordered else "(?!)")
        self._longest = max(map(len, forms), default=0)
        self._safe: dict[tuple[str, str], SafeText] = {}

    def may_become(self, text: str) -> bool:
        """Whether the text is the beginning of a mark."""
        return text in self._beginnings

    def find(self, text: str, pos: int, final: bool) -> Found:
        """Finds the first mark at or behind ``pos``; ``final``: no more text will come."""
        start = len(text) if final else self._open(text, pos)
        match = self._pattern.search(text, pos)
        if match is not None and (final or match.start() < start):
            return Found(match.start(), self._forms[match[0]], match.end())
        return Found(start)

    def at(self, text: str, pos: int, final: bool) -> Found | None:
        """Returns the mark that is at ``pos``, one without a mark if none is, None if unsure."""
        if not final and len(text) - pos < self._longest:
            rest = text[pos:]
            if not rest or rest in self._beginnings:
                return None
        match = self._pattern.match(text, pos)
        return Found(pos) if match is None else Found(pos, self._forms[match[0]], match.end())

    def safe_text(self, other: str = "", last: str = "") -> "SafeText":
        """Returns the texts in which no mark begins, and without some other characters.

        They do not end with one of the characters ``last`` either. Both are classes in a pattern.
        """
        safe = self._safe.get((other, last))
        if safe is None:
            outside = "\ud800-\udfff" + re.escape(self.first) + other
            pattern = f"[^{outside}]*[^{outside}{last}]" if last else f"[^{outside}]+"
            safe = self._safe[other, last] = SafeText(re.compile(pattern))
        return safe

    def _open(self, text: str, pos: int) -> int:
        """Returns the start of the longest end that is the beginning of a mark."""
        for match in self._starts.finditer(text, max(pos, len(text) - self._longest + 1)):
            if text[match.start() :] in self._beginnings:
                return match.start()
        return len(text)


class SafeText:
    """Texts that match a pattern; of those, ``chars`` are the ASCII characters."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.accepts: Callable[[str], object] = pattern.fullmatch
        self.chars = frozenset(char for char in map(chr, range(128)) if pattern.fullmatch(char))

    def direct(self, kind: EventKind, index: int = 0) -> "Direct":
        """Returns that such texts are events of this kind."""
        return Direct(self.chars, self.accepts, kind, index)


class Direct(NamedTuple):
    """Text that needs no reading now: it becomes an event as it is, or none."""

    chars: Collection[str]  # such texts that are looked up first
    accepts: Callable[[str], object]  # whether another text is such; it counts as read then
    kind: EventKind | None = None
    index: int = 0  # type: ignore[assignment]


class Feed:
    """The text that has arrived and is not read yet."""

    def __init__(self, markers: Markers) -> None:
        self.markers = markers
        self.text = ""
        self.pos = 0
        self.ended = False
        self.is_cut = False  # at the end: the model would have gone on
        self.direct: Direct | None = None  # set before waiting, with all text read
        self._tape: list[str] | None = None  # what was read and may have to be content
        self._taped = 0  # its length

    def put(self, text: str) -> None:
        """Appends text."""
        self.text += text
        self.direct = None

    def drop(self) -> None:
        """Drops what was read."""
        self.text = self.text[self.pos :]
        self.pos = 0

    def record(self) -> None:
        """Starts to record what is read, so that it can be given back as content."""
        self._tape, self._taped = [], 0

    def forget(self) -> None:
        """Ends the record: something of it was emitted."""
        self._tape, self._taped = None, 0

    def release(self) -> str:
        """Ends the record and returns it as the model wrote it."""
        tape, self._tape, self._taped = self._tape or [], None, 0
        return self.markers.decode("".join(tape))

    @property
    def rest(self) -> str:
        """The text that is not read yet."""
        return self.text[self.pos :]

    @property
    def room(self) -> int:
        """Characters that may still be read into the record."""
        return MAX_HELD - self._taped

    def take(self, end: int) -> str:
        """Reads up to ``end``."""
        part = self.text[self.pos : end]
        self.pos = end
        self.note(part)
        return part

    def note(self, part: str) -> None:
        """Records what was read."""
        if self._tape is not None:
            self._tape.append(part)
            self._taped += len(part)

    def peek(self) -> Steps[str]:
        """Returns the next character, or "" at the end."""
        while self.pos >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def skip(self, pattern: re.Pattern[str] = _BLANKS) -> Steps[str]:
        """Reads blanks; returns the next character, or "" at the end."""
        while True:
            match = pattern.match(self.text, self.pos)
            if match is not None and match.end() > self.pos:
                self.take(match.end())
            if self.pos < len(self.text):
                return self.text[self.pos]
            if self.ended:
                return ""
            yield

    def skip_newlines(self) -> Steps[str]:
        """Reads newlines; returns the next character, or "" at the end."""
        return (yield from self.skip(_NEWLINES))

    def match(self, marks: MarkSet) -> Steps[str]:
        """Reads one of the marks if it is next; returns it, or "".

        Of a mark within which the answer is cut it reads what there is.
        """
        mark = yield from self.sees(marks)
        if mark:
            match = marks.at(self.text, self.pos, True)
            self.take(match.end if match is not None else self.pos)
        elif self.is_cut and marks.may_become(self.rest):
            self.take(len(self.text))
        return mark

    def sees(self, marks: MarkSet) -> Steps[str]:
        """Returns the mark that is next without reading it, or ""."""
        while True:
            match = marks.at(self.text, self.pos, self.ended)
            if match is not None:
                return match.mark
            if self.ended:
                return ""
            yield

    def until(self, marks: MarkSet, limit: int) -> Steps[str | None]:
        """Reads up to a mark, which stays; returns None if none is within ``limit``."""
        parts: list[str] = []
        left = limit
        safe = marks.safe_text().accepts

        def reads(text: str) -> bool:
            nonlocal left
            if len(text) > left or not safe(text):
                return False
            parts.append(text)
            left -= len(text)
            self.note(text)
            return True

        while True:
            match = marks.find(self.text, self.pos, self.ended)
            # No further than one character too many, however much has arrived.
            part = self.take(min(match.start, self.pos + left + 1))
            parts.append(part)
            left -= len(part)
            if left < 0:
                return None
            if match.mark:
                return "".join(parts)
            if self.ended:
                return None
            if self.pos == len(self.text):
                self.direct = Direct((), reads)
            yield


def emit_text(
    feed: Feed,
    writer: EventWriter,
    kind: EventKind,
    stops: MarkSet,
    blanks: str = "",
    closing: MarkSet | None = None,
) -> Steps[str]:
    """Emits text up to a mark, which stays; returns the mark, or "" at the end.

    Blanks before the mark stay too, at most so many as are ever held.

    Args:
        closing: of an answer that is cut within one of these marks, the mark goes. One character
            alone may be text.
    """
    direct = stops.safe_text("", blanks).direct(kind)
    while True:
        match = stops.find(feed.text, feed.pos, feed.ended)
        if closing is not None and feed.is_cut and not match.mark:
            start = closing.find(feed.text, feed.pos, False).start
            if len(feed.text) - start > 1:
                match = Found(start)
                feed.text = feed.text[:start]
        end = _without(blanks, feed.text, feed.pos, match.start)
        writer.add(kind, feed.markers.decode(feed.take(end)))
        if match.mark:
            return match.mark
        if feed.ended:
            return ""
        if feed.pos == len(feed.text):
            feed.direct = direct
        yield


def _without(blanks: str, text: str, start: int, end: int) -> int:
    """Returns the end of the text without the blanks at its end."""
    least = max(start, end - HELD_BLANKS)
    return least + len(text[least:end].rstrip(blanks)) if blanks else end

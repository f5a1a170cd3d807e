"""A run of calls: the marks around and between them, and what becomes of text that is no call."""

from typing import Literal

from rayfin.deployments.text.parsing.element_calls import ElementCalls
from rayfin.deployments.text.parsing.events import EventKind, EventWriter
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.json_calls import JsonCalls
from rayfin.deployments.text.parsing.marks import Feed, Steps
from rayfin.deployments.text.parsing.python_calls import BracesCalls, PythonCalls
from rayfin.deployments.text.parsing.tagged_calls import TaggedCalls

Outcome = Literal["called", "broken", "refused"]
"""called: calls, with their last mark; broken: the mark behind a call is still to come, as other
text is before it; refused: no call, its text was given back."""


class CallReader:
    """Reads the calls of one format, from the mark that begins them on."""

    def __init__(
        self,
        feed: Feed,
        writer: EventWriter,
        row: ToolFormat,
        forced: bool,
    ) -> None:
        self._feed = feed
        self._writer = writer
        self._row = row
        self._forced = forced
        self._json = JsonCalls(feed, writer, row)
        tags = ElementCalls if row.syntax == "elements" else TaggedCalls
        self._tagged = tags(feed, writer, row)
        self._python = PythonCalls(feed, writer)
        self._braces = BracesCalls(feed, writer, row)
        marks = feed.markers.marks
        self._begins = marks(*row.begins)
        self._ends = frozenset((*row.ends, row.arguments[1].strip()))
        around = (*row.begins, *self._ends, row.separator.strip())
        self._around = marks(*around)
        self._section_end = row.section[1].strip()
        self._is_closed = False  # a mark behind the last call was read
        # Further objects may follow without a mark of their own.
        self._in_a_row = row.syntax == "json" and row.layout == "object" and not row.call[0]

    def read(self, mark: str, kind: EventKind) -> Steps[Outcome]:
        """Reads calls behind ``mark``, which is recorded, or bare ones.

        Args:
            kind: what text is that turns out to be no call.
        """
        calls = self._writer.calls
        self._writer.named = False
        following: str | None = mark
        while following is not None:
            before = self._writer.calls
            if not (yield from self._read_body(following)):
                self._settle(bool(mark), self._writer.calls > before, kind)
                return "broken" if self._writer.calls > calls else "refused"
            self._feed.record()
            following = yield from self._read_marks()
        self._give_back(kind)
        needs_end = bool(mark and (self._row.call[1] or self._row.section[1]))
        return "broken" if needs_end and not self._is_closed else "called"

    def _read_body(self, mark: str) -> Steps[bool]:
        while mark:
            yield from self._feed.skip()
            further = yield from self._feed.match(self._begins)
            if not further:
                break
            mark = further
        if self._row.syntax in ("tagged", "elements"):
            return (yield from self._tagged.read(mark))
        if self._row.syntax == "python":
            return (yield from self._python.read(bool(mark)))
        if self._row.syntax == "braces":
            return (yield from self._braces.read())
        return (yield from self._json.read())

    def _read_marks(self) -> Steps[str | None]:
        """Reads what stands behind a call; returns the mark of the next, "" if it has none."""
        section_open = True
        self._is_closed = False
        while True:
            char = yield from self._feed.skip()
            mark = yield from self._feed.match(self._around)
            if mark in self._row.begins:
                return mark
            if char and self._feed.is_cut and not self._feed.rest:
                self._feed.record()  # within a mark
            if not mark:
                return "" if self._in_a_row and section_open and char == "{" else None
            if mark in self._ends:
                self._feed.record()
                self._is_closed = True
                section_open = section_open and mark != self._section_end

    def _settle(self, marked: bool, emitted: bool, kind: EventKind) -> None:
        """Accounts for text that is no whole call."""
        writer, feed = self._writer, self._feed
        if writer.is_open:
            writer.give_up()
            if not feed.ended:
                writer.add(kind, feed.release())
        elif not feed.ended or feed.pos < len(feed.text):
            writer.unparsed += marked
            writer.add(kind, feed.release())
        elif emitted:
            pass  # only marks are missing
        elif feed.is_cut and (marked or self._forced or writer.named):
            writer.cut += 1
        else:
            writer.unparsed += marked
            writer.add(kind, feed.release())
        feed.forget()

    def _give_back(self, kind: EventKind) -> None:
        """Gives back what stands behind the last mark, if it is more than blanks."""
        text = self._feed.release()
        self._writer.add(kind, text if text.strip() else "")

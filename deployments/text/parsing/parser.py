"""An answer as it comes, as events: reasoning, content, calls."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rayfin.deployments.text.parsing.calls import CallReader
from rayfin.deployments.text.parsing.channels import ChannelReader
from rayfin.deployments.text.parsing.events import Event, EventKind, EventWriter, Piece, new_event
from rayfin.deployments.text.parsing.format import ReasoningFormat, ToolFormat
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.parsing.json_calls import read_arguments
from rayfin.deployments.text.parsing.marks import Feed, Markers, Steps, emit_text

_BLANKS = " \t\r\n"


class OutputParser:
    """Reads one choice's answer; its events depend on the text so far, not on how it was cut.

    Args:
        tools: how calls are written; None if the request has no tools.
        reasoning: how thoughts are written.
        functions: the name of each function, and the JSON schema of its parameters.
        starts_inside: the prompt has opened a thought.
        forced: "required" or the name of a function: the answer is calls. Without ``tools`` it is a
            JSON list of calls, or the arguments of the named function alone.
        ends_thoughts: marks of calls that may end a thought; None: all, if the format says so.
        cut_thoughts: a thought may be ended before the model ends it, which it may still do.
        special: marks that are special tokens: text that looks like one stays text.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        functions: Mapping[str, Mapping[str, Any]],
        starts_inside: bool = False,
        forced: str = "",
        special: Collection[str] = (),
        ends_thoughts: Collection[str] | None = None,
        cut_thoughts: bool = False,
    ) -> None:
        if tools is None and forced == "required":
            tools = TOOL_FORMATS["json"]
        self._feed = Feed(_markers(tools, reasoning, frozenset(special)))
        self._writer = EventWriter(functions)
        self._writer.in_thought = starts_inside and reasoning is not None
        if (tools is not None and tools.syntax == "channels") or (
            reasoning is not None and reasoning.channels
        ):
            self._steps = ChannelReader(self._feed, self._writer).run()
        else:
            reader = AnswerReader(self._feed, self._writer, tools, reasoning, forced, ends_thoughts)
            if cut_thoughts:
                reader.drop_closes()
            self._steps = reader.run()
        self._advance()

    @property
    def markers(self) -> frozenset[str]:
        """Texts that are marks: a token that is one of them comes as a piece's ``marker``."""
        return frozenset(self._feed.markers.chars)

    @property
    def in_reasoning(self) -> bool:
        """The answer is within a thought now."""
        return self._writer.in_thought

    @property
    def holds_back(self) -> bool:
        """There is text that may be the beginning of a mark."""
        return bool(self._feed.rest)

    @property
    def unparsed(self) -> int:
        """Calls that became content."""
        return self._writer.unparsed

    @property
    def cut(self) -> int:
        """Calls without an end."""
        return self._writer.cut

    def push(self, pieces: Sequence[Piece]) -> list[Event]:
        """Returns the events that are certain with these further pieces."""
        feed = self._feed
        direct = feed.direct
        if direct is not None and len(pieces) == 1:
            text, marker = pieces[0]
            chars, accepts, kind, index = direct
            if not marker and (text in chars or accepts(text)):
                return [] if kind is None else [new_event((kind, text, index, ""))]
        text = "".join([feed.markers.encode(piece) for piece in pieces])
        if not text:
            return []
        feed.put(text)
        self._advance()
        feed.drop()
        return self._writer.drain()

    def finish(self, reason: str) -> list[Event]:
        """Returns the last events; ``reason`` is the answer's finish reason."""
        self._feed.put("")
        self._feed.ended = True
        self._feed.is_cut = reason != "stop"
        self._advance()
        return self._writer.drain()

    def _advance(self) -> None:
        next(self._steps, None)


@lru_cache(maxsize=64)
def _markers(
    tools: ToolFormat | None, reasoning: ReasoningFormat | None, special: frozenset[str]
) -> Markers:
    """Returns the markers of an answer: the same for all of a model, so that they are made once."""
    rows = [row for row in (tools, reasoning) if row is not None]
    marks = [mark for row in rows for mark in row.marks]
    return Markers(marks, {token for row in rows for token in row.tokens}, special)


class AnswerReader:
    """Reads thoughts, content and calls between marks.

    Args:
        forced, ends_thoughts: as of ``OutputParser``.
    """

    def __init__(
        self,
        feed: Feed,
        writer: EventWriter,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        forced: str,
        ends_thoughts: Collection[str] | None = None,
    ) -> None:
        self._feed = feed
        self._writer = writer
        self._tools = tools
        self._forced = forced
        self._calls = CallReader(feed, writer, tools, bool(forced)) if tools else None
        marks = feed.markers.marks
        begins = tools.begins if tools is not None else ()
        ends = (*tools.ends, tools.arguments[1].strip()) if tools is not None else ()
        row = reasoning or ReasoningFormat(name="none")
        frame = tools.frame if tools is not None else ()
        dropped = tuple(dict.fromkeys(filter(None, (*row.dropped, *frame))))
        self._row, self._begins, self._dropped = row, set(begins), dropped
        self._last_mark = (tools.section[1] or tools.call[1]).strip() if tools is not None else ""
        self._first = marks(*row.open, *begins, *dropped)
        # Of text, and of text behind a broken call.
        self._stops = [marks(*begins, *dropped), marks(*begins, *dropped, *ends)]
        self._is_broken = False
        calling = begins if ends_thoughts is None else tuple(ends_thoughts)
        self._stops_of_thought = marks(*row.close, *(calling if row.ends_at_call else ()))
        # A sentence that closes a thought may also begin another one.
        closing = [mark for mark in row.close if not mark[0].isalpha()]
        self._closing = marks(*closing, *dropped[1::2])
        self._at_start = True  # of the answer, or behind a thought or a call

    def drop_closes(self) -> None:
        """A thought has ended without its mark, or may: the mark is no content from now on."""
        row, marks, tools = self._row, self._feed.markers.marks, self._tools
        self._first = marks(*row.open, *self._begins, *self._dropped, *row.close)
        free = (*self._begins, *self._dropped, *row.close)
        ends = () if tools is None else (*tools.ends, tools.arguments[1].strip())
        self._stops = [marks(*free), marks(*free, *ends)]

    def run(self) -> Steps[None]:
        """Reads to the end of the answer."""
        feed = self._feed
        if self._writer.in_thought:
            yield from self._read_thought()
        if self._tools is None and self._forced:
            yield from self._read_forced_arguments()
        while True:
            mark, char = yield from (self._begin_text() if self._at_start else self._read_text())
            if mark in self._row.open:
                yield from self._read_thought()
            elif mark in self._begins or (not mark and self._at_start and self._is_bare(char)):
                yield from self._read_calls(mark, "content")
            elif mark in self._row.close and not self._at_start:
                text = feed.release()  # the blanks before it stay
                self._writer.add("content", text[: len(text) - len(text.lstrip())])
            elif mark in self._dropped or mark in self._row.close:
                feed.forget()
                yield from feed.skip_newlines()
                self._begin_again()
            elif mark:  # a broken call has left it
                feed.forget()
                if mark == self._last_mark:
                    self._begin_again()
            else:
                self._writer.add("content", feed.release())
                if not char:
                    return
                self._at_start = False

    def _begin_text(self) -> Steps[tuple[str, str]]:
        """Reads blanks and a mark; returns the mark or "", and the character behind the blanks."""
        self._feed.record()
        char = yield from self._feed.skip()
        return (yield from self._feed.match(self._first)), char

    def _read_text(self) -> Steps[tuple[str, str]]:
        """Emits content; returns the mark behind it, or "" at the end of the answer."""
        stops = self._stops[self._is_broken]
        blanks = _BLANKS if stops.first else ""
        mark = yield from emit_text(
            self._feed, self._writer, "content", stops, blanks, self._closing
        )
        self._feed.record()
        char = yield from self._feed.skip()
        yield from self._feed.match(stops)
        return mark, char

    def _read_thought(self) -> Steps[None]:
        """Reads a thought, whose mark was read, up to its end."""
        feed, writer = self._feed, self._writer
        feed.forget()
        writer.in_thought = True
        yield from feed.skip_newlines()
        if (
            yield from feed.sees(self._first)
        ) in self._row.open:  # the prompt has opened it as well
            yield from feed.match(self._first)
            yield from feed.skip_newlines()
        while writer.in_thought:
            mark = yield from emit_text(
                feed, writer, "reasoning", self._stops_of_thought, "\n", self._closing
            )
            feed.record()
            yield from feed.skip_newlines()
            yield from feed.match(self._stops_of_thought)
            if mark in self._begins:
                yield from self._read_calls(mark, "reasoning")
                if not writer.in_thought:
                    self.drop_closes()
                continue
            feed.forget()
            writer.in_thought = False
            yield from feed.skip_newlines()
            self._begin_again()

    def _read_calls(self, mark: str, kind: EventKind) -> Steps[None]:
        if self._calls is None:
            return
        outcome = yield from self._calls.read(mark, kind)
        self._at_start = outcome == "called"
        if outcome == "called":
            self._begin_again()
        elif outcome == "broken":
            self._is_broken = True

    def _begin_again(self) -> None:
        self._at_start = True
        self._is_broken = False

    def _is_bare(self, char: str) -> bool:
        row = self._tools
        if row is None or not row.bare or not char:
            return False
        return char in ("[" if row.syntax == "python" else "[{")

    def _read_forced_arguments(self) -> Steps[None]:
        """Reads an answer that is the arguments of the forced function."""
        feed, writer = self._feed, self._writer
        name = writer.find(self._forced)
        feed.record()
        if name is None:
            feed.forget()
        elif (yield from read_arguments(feed, writer, name)):
            yield from feed.skip()
            feed.forget()
        elif writer.is_open:
            writer.give_up()
        else:
            writer.add("content", feed.release())

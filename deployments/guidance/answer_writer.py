"""Whole answers: text and calls, calls alone, and the messages of OpenAI's harmony."""

from collections.abc import Sequence

from rayfin.deployments.guidance.call_writer import ANY_OBJECT, Callee, CallWriter
from rayfin.deployments.guidance.lark import BLANK, LarkWriter, escaped, literal
from rayfin.deployments.text.parsing.format import ToolFormat

_ALL_CHANNELS = '("analysis" | "commentary" | "final")'
_CHANNELS = '("analysis" | "commentary")'


class AnswerWriter:
    """Writes the start rule of an answer in one row's syntax."""

    def __init__(self, lark: LarkWriter, row: ToolFormat) -> None:
        self._lark = lark
        self._row = row
        self._calls = CallWriter(lark, row)

    def only_calls(self, callees: Sequence[Callee], *, several: bool) -> str:
        """Returns the expression of calls without a text beside them."""
        if self._row.syntax == "channels":
            return self._messages(self._call_message(callees), several, '"analysis"')
        calls = self._calls.calls(callees, several=several)
        opening, closing = map(self._lark.mark, self._row.frame)
        return f"(({opening})? {closing})? {calls}" if closing else calls

    def only_text(self) -> str:
        """Returns the expression of a text without a call."""
        if self._row.syntax == "channels":
            return self._messages(self._text_message(), False)
        return self._framed(self._lark.free(*self._text_marks()))

    def text_and_calls(self, callees: Sequence[Callee], *, several: bool) -> str:
        """Returns the expression of messages that may hold calls."""
        last = f"({self._text_message()} | {self._call_message(callees)})"
        return self._messages(last, several)

    @property
    def openings(self) -> list[str]:
        """The marks that begin a call in a text; "" of calls that begin an answer without one."""
        row = self._row
        first = row.section[0] or row.call[0] or (row.function[0] if row.syntax == "tagged" else "")
        bare = [""] if row.bare else []
        return [*bare, *(mark for mark in (first.strip(), *row.openings) if mark)]

    def begun(self, mark: str, callees: Sequence[Callee], *, several: bool) -> str:
        """Returns the expression of a text up to ``mark``, and the calls behind it."""
        if not mark:
            return self._calls.bare(callees, several=several)[0]
        return f"{self._lark.until(mark)} {self._behind(mark, callees, several)}"

    def behind_the_last(self, callees: Sequence[Callee]) -> str:
        """Returns the expression of what follows a single call: its closing text, and no call."""
        ends = [end for text in self._row.closings if (end := self._lark.mark(text))]
        closing = f"({' | '.join(ends)})?" if ends else ""
        if not self._row.bare:
            return f"{closing} {self._lark.free(*self._text_marks())}".lstrip()
        _, head = self._calls.bare(callees, several=False)
        text = f"/(?s:.+)/ & ~/(?s:({head}).*)/"
        if marks := self._text_marks():
            text += f" & ~/(?s:.*({'|'.join(map(escaped, marks))}).*)/"
        return f"{closing} {self._lark.terminal(text)}?".lstrip()

    def around(self, answer: str) -> str:
        """Returns the expression of an answer of its own form, with what the row writes around."""
        if self._row.syntax != "channels":
            return self._framed(answer)
        mark = self._lark.mark
        return self._messages(
            f"{mark('<|channel|>')} {literal('final')} {mark('<|message|>')} {answer}", False
        )

    def _framed(self, text: str) -> str:
        """A text with the marks that the row may have around it."""
        opening, closing = map(self._lark.mark, self._row.frame)
        return f"({opening})? ({text}) ({closing})?" if closing else text

    def _text_marks(self) -> list[str]:
        """Those of them that hold no token."""
        parts = [(mark, self._lark.parts(mark)) for mark in self.openings if mark]
        return [mark for mark, pieces in parts if all(isinstance(part, str) for part in pieces)]

    def _behind(self, mark: str, callees: Sequence[Callee], several: bool) -> str:
        """The calls behind a mark; other texts may end those that other texts begin."""
        row, calls = self._row, self._calls
        if mark not in row.openings:
            return calls.behind(mark, callees, several=several)
        ends = [end for text in row.closings if (end := self._lark.mark(text))]
        closing = f"({' | '.join(ends)})?" if ends else ""
        return f"{BLANK} {calls.run(callees, several=several)} {closing}".rstrip()

    def _messages(self, last: str, several: bool, channels: str = _CHANNELS) -> str:
        """Messages of the harmony; the last one is ``last``, those before it are texts."""
        mark = self._lark.mark
        between = mark(self._row.separator, exact=True)
        end = mark("<|end|>") or literal("<|end|>")
        text = self._lark.rule(f"{self._text_message(channels)} {end} {between}")
        final = self._lark.rule(last)
        more = f"({between} {text}* {final})*" if several and self._can_go_on() else ""
        return f"({between})? {text}* {final} {more}"

    def _can_go_on(self) -> bool:
        """Whether a call's last token does not end the answer."""
        return bool(self._lark.parts(self._row.call[1]))

    def _text_message(self, channels: str = _ALL_CHANNELS) -> str:
        mark = self._lark.mark
        return f"{mark('<|channel|>')} {channels} {mark('<|message|>')} {self._lark.free()}"

    def _call_message(self, callees: Sequence[Callee]) -> str:
        """A call's recipient stands before its channel or behind it."""
        mark, options = self._lark.mark, []
        kind = f'(" "? {mark("<|constrain|>")} "json" | " json")?'
        for callee in callees:
            schema = ANY_OBJECT if callee.schema is None else callee.schema
            to = literal(f" to=functions.{callee.name}")
            header = (
                f"({to} {mark('<|channel|>')} {_CHANNELS} | {mark('<|channel|>')} {_CHANNELS} {to})"
            )
            options.append(f"{header} {kind} {mark('<|message|>')} {self._lark.json(schema)}")
        return f"({' | '.join(options)}) {mark(self._row.call[1])}".rstrip()

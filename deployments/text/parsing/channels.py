"""The messages of OpenAI's harmony: each has a channel, and a recipient if it is a call."""

import re

from rayfin.deployments.text.parsing.events import EventKind, EventWriter
from rayfin.deployments.text.parsing.json_calls import read_arguments
from rayfin.deployments.text.parsing.marks import Feed, Steps, emit_text

MAX_HEADER = 512
TOKENS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_ROLE = "assistant"
_TO = "to="


class ChannelReader:
    """Reads an answer of such messages."""

    def __init__(self, feed: Feed, writer: EventWriter) -> None:
        self._feed = feed
        self._writer = writer
        marks = feed.markers.marks
        self._tokens = marks(*TOKENS)
        self._message = marks("<|message|>")
        self._ends = marks("<|end|>", "<|call|>", "<|return|>")
        self._stops = marks("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")

    def run(self) -> Steps[None]:
        """Reads to the end of the answer."""
        if self._writer.in_thought:
            yield from self._emit("reasoning")
        while (yield from self._feed.peek()):
            self._feed.record()
            header = yield from self._read_header()
            if header is None:
                self._give_back()
                yield from self._emit("content")
            elif header:
                yield from self._read_message(header)

    def _read_header(self) -> Steps[str | None]:
        """Reads up to the text of a message; returns None if it is no header, "" if it is empty."""
        feed = self._feed
        parts: list[str] = []
        while True:
            text = yield from self._read_plain("".join(parts))
            if text is None:
                return None
            parts.append(text)
            mark = yield from feed.match(self._tokens)
            parts.append(mark)
            if mark == "<|message|>":
                return "".join(parts)
            if not mark and len(parts) == 2:
                return None
            if not mark or mark in ("<|end|>", "<|call|>", "<|return|>"):
                feed.forget()
                return ""
            if sum(map(len, parts)) > MAX_HEADER:
                return None

    def _read_plain(self, before: str) -> Steps[str | None]:
        """Reads a header's text up to a token; returns None as soon as it cannot be a header."""
        feed = self._feed
        parts: list[str] = []
        size = 0
        while True:
            match = self._tokens.find(feed.text, feed.pos, feed.ended)
            while feed.pos < match.start:
                parts.append(feed.take(feed.pos + 1))
                size += 1
                if size > MAX_HEADER or not _may_be_header(before, "".join(parts[:64])):
                    return None
            if match.mark or feed.ended:
                return "".join(parts)
            yield

    def _read_message(self, header: str) -> Steps[None]:
        feed, writer = self._feed, self._writer
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient is not None:
            name = writer.find(recipient[1])
            if name is not None:
                yield from self._read_call(name)
                return
            writer.unparsed += 1
            self._give_back()
        feed.forget()
        thinks = recipient is None and channel is not None and channel[1] == "analysis"
        yield from self._emit("reasoning" if thinks else "content")

    def _read_call(self, name: str) -> Steps[None]:
        feed, writer = self._feed, self._writer
        yield from feed.skip()
        if (yield from feed.sees(self._stops)):
            writer.begin(name)
            writer.arguments("{}")
            writer.end()
            feed.forget()
        elif not (yield from read_arguments(feed, writer, name)):
            if writer.is_open:
                writer.give_up()
            elif feed.ended:
                writer.cut += 1
                feed.forget()
            else:
                writer.unparsed += 1
                self._give_back()
        else:
            feed.forget()
        yield from feed.skip()
        yield from self._emit("content")

    def _emit(self, kind: EventKind) -> Steps[None]:
        """Emits the text of a message."""
        feed, writer = self._feed, self._writer
        thinks = writer.in_thought = kind == "reasoning"
        if thinks:
            yield from feed.skip_newlines()
        yield from emit_text(feed, writer, kind, self._stops, "\n" if thinks else "", self._stops)
        feed.forget()
        yield from feed.skip_newlines()
        yield from feed.match(self._ends)
        writer.in_thought = False

    def _give_back(self) -> None:
        self._writer.add("content", self._feed.release())


def _may_be_header(before: str, text: str) -> bool:
    """Whether text may stand in a header: a role, a recipient, a channel, a type of content."""
    if before:
        return True
    text = text.lstrip()
    return any(text.startswith(word) or word.startswith(text) for word in (_ROLE, _TO))

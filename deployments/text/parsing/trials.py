"""Whether a row reads what a template writes."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.parsing.format import ReasoningFormat, ToolFormat
from rayfin.deployments.text.parsing.parser import OutputParser
from rayfin.deployments.text.parsing.render import WrittenCall, render_calls
from rayfin.deployments.text.parsing.template_probe import (
    EMPTY,
    FIRST,
    FUNCTIONS,
    OTHER,
    SECOND,
    TemplateProbe,
    called,
)
from rayfin.deployments.text.tokenizer import Tokenizer


class Trial(NamedTuple):
    """An assistant's turn by several guesses, and the calls within."""

    calls: tuple[WrittenCall, ...]
    segments: list[str]


class CallTrials:
    """What a template writes for calls, with their arguments as objects or as text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        probe: TemplateProbe,
        reasoning: ReasoningFormat | None,
        as_text: bool,
    ) -> None:
        self._reasoning = reasoning
        self._added = tokenizer.added_ids
        self._special = {t for t, i in self._added.items() if i in tokenizer.special_token_ids}
        self._turn_marks = re.compile("|".join(map(re.escape, probe.turn_marks)) or "(?!)")
        self.as_text = as_text
        self.trials: list[Trial] = []
        for calls in ((FIRST,), (FIRST, SECOND), (EMPTY,), (OTHER,)):
            for content in ("", None):
                text = probe.render([called(calls, as_text, content)])
                segments = [] if text is None else probe.segments(text)
                names = [call.name for call in calls]
                if any(all(name in segment for name in names) for segment in segments):
                    self.trials.append(Trial(calls, segments))
                    break

    @property
    def shows_a_call(self) -> bool:
        """The template writes calls."""
        return bool(self.trials) and self.trials[0].calls == (FIRST,)

    def score(self, row: ToolFormat) -> tuple[int, int, int]:
        """Returns how many turns the row reads, writes in the same way, and in the same bytes.

        Nothing counts if it does not read a single call.
        """
        read = loose = exact = 0
        for calls, segments in self.trials:
            segment = next((s for s in segments if self._reads(row, s, calls)), None)
            if segment is None:
                if calls == (FIRST,):
                    return (0, 0, 0)
                continue
            read += 1
            texts = {
                render_calls(row, calls),
                render_calls(row, [c._replace(id="") for c in calls]),
            }
            exact += any(text in segment for text in texts)
            bare = "".join(segment.split())
            loose += any("".join(text.split()) in bare for text in texts)
        return (read, loose, exact)

    def _reads(self, row: ToolFormat, segment: str, calls: Sequence[WrittenCall]) -> bool:
        reasoning = self._reasoning
        if reasoning is not None and reasoning.channels != (row.syntax == "channels"):
            reasoning = None
        parser = OutputParser(row, reasoning, functions=FUNCTIONS, special=self._special)
        events = parser.push(self.pieces(segment, parser.markers))
        parsed, content = read_calls([*events, *parser.finish("stop")])
        wanted = [(call.name, dict(call.arguments)) for call in calls]
        return parsed == wanted and not self._turn_marks.sub("", content).strip()

    def triggers_of(self, row: ToolFormat) -> tuple[str, ...]:
        """Returns the last token within the mark that begins a call, unless turns have it."""
        tokens = [token for token in self._added if token in (row.begins or ("",))[0]]
        tokens = [token for token in tokens if not self._turn_marks.search(token)]
        return tuple(sorted(tokens, key=row.begins[0].rfind)[-1:]) if tokens else ()

    def pieces(self, text: str, markers: frozenset[str]) -> list[Piece]:
        """Returns a text as a detokenizer would: markers that are tokens on their own."""
        tokens = sorted((m for m in markers if m in self._added), key=len, reverse=True)
        if not tokens:
            return [Piece(text)]
        parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
        return [Piece(marker=part) if part in tokens else Piece(part) for part in parts if part]


def read_calls(events: Sequence[Event]) -> tuple[list[tuple[str, Any]] | None, str]:
    """Returns the calls, None if one is broken, and the content."""
    names = [event.name for event in events if event.kind == "call"]
    texts = [""] * len(names)
    for event in events:
        if event.kind == "arguments":
            texts[event.index] += event.text
    content = "".join(event.text for event in events if event.kind == "content")
    if sum(event.kind == "call_end" for event in events) != len(names):
        return None, content
    try:
        return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)], content
    except ValueError:
        return None, content

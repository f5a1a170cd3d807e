"""Where an answer is shown while it streams: as Markdown on a terminal, else as it comes."""

import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayfin.deployments.bench.endpoint import StreamPiece

FENCE = re.compile(r" {0,3}(```+|~~~+)")
INDENTED = re.compile(r"( {2,}|\t|[-*+] |\d+[.)] |[>|])")
MARGIN = 4  # rows of the terminal that the part that grows leaves free


class PlainScreen:
    """Prints the text as it comes, and no reasoning."""

    def answer(self, pieces: "Iterator[StreamPiece]") -> None:
        for piece in pieces:
            if piece.text:
                print(piece.text, end="", flush=True)
        print()

    def note(self, text: str) -> None:
        """Says something that is no answer."""
        print(text, file=sys.stderr)


class MarkdownScreen:
    """Prints each block as Markdown once it is complete, and shows the one that grows."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def answer(self, pieces: "Iterator[StreamPiece]") -> None:
        """Shows an answer, and below it how many tokens it had and how fast they came."""
        from rich.live import Live

        began, first, tokens = time.monotonic(), 0.0, 0
        text = reasoning = ""
        settings: dict[str, Any] = {"transient": True, "refresh_per_second": 10}
        with Live(console=self._console, **settings) as live:
            try:
                for piece in pieces:
                    if piece.text or piece.reasoning:
                        first = first or time.monotonic()
                    tokens = piece.completion_tokens or tokens
                    reasoning += piece.reasoning
                    text += piece.text
                    done, text = complete_blocks(text)
                    if reasoning and (text or done):
                        self._console.print(_dim(reasoning))
                        reasoning = ""
                    if done.strip():
                        self._console.print(_markdown(done))
                    live.update(self._growing(reasoning, text))
            finally:
                live.update("")
                if reasoning:
                    self._console.print(_dim(reasoning))
                if text.strip():
                    self._console.print(_markdown(text))
        self._console.print(f"[dim]{_speed(began, first, tokens)}[/]\n")

    def note(self, text: str) -> None:
        """Says something that is no answer."""
        self._console.print(text, style="dim", markup=False)

    def _growing(self, reasoning: str, text: str) -> Any:
        """The end of what grows: a terminal cannot redraw what has left it."""
        rows = max(self._console.height - MARGIN, 1)
        lines = (text or reasoning).splitlines()
        opening = FENCE.match(lines[0]) if lines else None
        if len(lines) > rows:
            lines = [lines[0], *lines[1 - rows :]] if opening else lines[-rows:]
        shown = "\n".join(lines)
        return _markdown(shown) if text else _dim(shown)


def complete_blocks(text: str) -> tuple[str, str]:
    """Splits Markdown into blocks to which nothing will be added, and the rest.

    A block ends at a blank line outside a fence, unless what follows may belong to it: a list, a
    quote or a table goes on with a line of its kind.
    """
    end, fence, place = 0, "", 0
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        place += len(line)
        if not line.endswith("\n"):
            break
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence, end = "", place
        elif not fence and not line.strip():
            following = lines[number + 1] if number + 1 < len(lines) else ""
            whole = following.endswith("\n") or len(following) > len("100. ")
            if whole and following.strip() and not INDENTED.match(following):
                end = place
    return text[:end], text[end:]


def _markdown(text: str) -> Any:
    from rich.markdown import Markdown

    return Markdown(text, hyperlinks=False)  # an address is shown, not hidden behind a word


def _dim(text: str) -> Any:
    from rich.text import Text

    return Text(text.strip() + "\n", style="dim italic")


def _speed(began: float, first: float, tokens: int) -> str:
    if not first:
        return "no text"
    parts = [f"{tokens} tokens"] if tokens else []
    parts.append(f"first after {first - began:.2f} s")
    took = time.monotonic() - first
    if tokens > 1 and took > 0.05:
        parts.append(f"{(tokens - 1) / took:.0f} tokens/s")
    return " · ".join(parts)

"""Which weights made which tokens: runs of tokens in the order of an output."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class VersionSpan(NamedTuple):
    """Tokens that follow one another, made by one version."""

    label: str
    tokens: int
    kept: bool = False  # over keys and values of the version before


Spans = tuple[VersionSpan, ...]


def joined(spans: Iterable[VersionSpan]) -> Spans:
    """The same with neighbours of one version as one."""
    out: list[VersionSpan] = []
    for span in spans:
        if out and (out[-1].label, out[-1].kept) == (span.label, span.kept):
            out[-1] = out[-1]._replace(tokens=out[-1].tokens + span.tokens)
        elif span.tokens:
            out.append(span)
    return tuple(out)


def first(spans: Iterable[VersionSpan], tokens: int) -> Spans:
    """The spans of the first ``tokens``."""
    out: list[VersionSpan] = []
    for span in spans:
        out.append(span._replace(tokens=min(span.tokens, tokens)))
        tokens -= out[-1].tokens
    return joined(out)


def as_json(spans: Sequence[VersionSpan]) -> list[dict[str, Any]]:
    """The spans as places in the output: from token ``start`` to before token ``end``."""
    out: list[dict[str, Any]] = []
    end = 0
    for span in joined(spans):
        start, end = end, end + span.tokens
        kept = {"kv": "kept"} if span.kept else {}
        out.append({"version": span.label, "start": start, "end": end, **kept})
    return out


class SpanLog:
    """The spans of one output as its tokens come."""

    def __init__(self, before: Sequence[VersionSpan] = ()) -> None:
        self._closed = list(before)
        self._label, self._tokens, self._kept = "", 0, False  # of the last span

    def add(self, label: str, tokens: int, *, kept: bool = False) -> None:
        """``tokens`` more have come; without a label they are in the spans before."""
        if not label:
            return
        if label != self._label or kept != self._kept:
            self._closed = list(self.spans)
            self._label, self._tokens, self._kept = label, 0, kept
        self._tokens += tokens

    @property
    def spans(self) -> Spans:
        """All so far."""
        return joined((*self._closed, VersionSpan(self._label, self._tokens, self._kept)))

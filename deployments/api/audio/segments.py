"""The segments of a transcript: what lies between the times in an answer's tokens.

Source of the form of answers: Radford et al., 2022, "Robust Speech Recognition via Large-Scale Weak
Supervision", section 2.3: a token for its begin stands before a segment, one for its end behind it.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pydantic import BaseModel


class Span(NamedTuple):
    """A segment of one clip."""

    start: float  # seconds in the clip
    end: float
    tokens: list[int]  # those of its times among them


class Segment(BaseModel):
    """A segment of a recording, with the members that OpenAI's have."""

    id: int
    seek: int  # hundredths of a second: where its window begins in the recording
    start: float  # seconds in the recording
    end: float
    text: str
    tokens: list[int]
    temperature: float
    # Of its window: the tokens' mean, the text's bytes over those of zlib, and of no speech.
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


def spans(
    tokens: Iterable[int], seconds: Callable[[int], float | None], length: float
) -> list[Span]:
    """The segments in an answer.

    One without an end, which its limit of tokens has cut, ends where the clip does. Times never run
    backwards, nor past the clip, whatever a model writes.

    Args:
        tokens: of the answer, without special ones.
        seconds: the time that a token stands for, if it is one.
        length: of the clip, seconds.
    """
    spans: list[Span] = []
    held: list[int] = []  # of the segment that has begun
    said = False  # it has text
    start = 0.0
    for token in tokens:
        time = seconds(token)
        if time is None:
            held.append(token)
            said = True
            continue
        time = min(max(time, start), length)
        if said:
            spans.append(Span(start, time, [*held, token]))
        held, said, start = [] if said else [token], False, time
    if said:
        spans.append(Span(start, length, held))
    return spans


class Sentences(NamedTuple):
    """What a window has whole."""

    spans: list[Span]
    end: float  # of the last one, seconds in the window; that of the window if there is none
    goes_on: bool  # the model says that more comes behind it


def sentences(
    tokens: Sequence[int], seconds: Callable[[int], float | None], length: float
) -> Sentences:
    """The segments that have an end. One without is heard again in the next window, unless it is
    all that there is.

    Args:
        tokens, seconds, length: see ``spans``.
    """
    segments = spans(tokens, seconds, length)
    if not segments or (len(segments) == 1 and seconds(tokens[-1]) is None):
        return Sentences(segments, length, False)
    if seconds(segments[-1].tokens[-1]) is None:
        return Sentences(segments[:-1], segments[-2].end, True)
    # The end alone says that all of the window was heard; a begin behind it, that more comes.
    return Sentences(segments, segments[-1].end, seconds(tokens[-2]) is not None)


# Segments as files of subtitles: SubRip, and WebVTT (https://www.w3.org/TR/webvtt1).


def srt(segments: Sequence[Segment]) -> str:
    """A file of SubRip."""
    return "".join(
        f"{number}\n{_span(segment, ',')}\n{_line(segment.text).replace('-->', '->')}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """A file of WebVTT, whose text has characters of markup escaped."""
    cues = (
        f"{_span(segment, '.')}\n{html.escape(_line(segment.text), quote=False)}\n\n"
        for segment in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str) -> str:
    """The text without line breaks: an empty line would end it."""
    return " ".join(text.split())


def _span(segment: Segment, point: str) -> str:
    return f"{_time(segment.start, point)} --> {_time(segment.end, point)}"


def _time(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    minutes, rest = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"

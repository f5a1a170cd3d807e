"""Segments as files of subtitles: SubRip, and WebVTT (https://www.w3.org/TR/webvtt1)."""

import html
from collections.abc import Sequence

from rayfin.deployments.api.audio.segments import Segment


def srt(segments: Sequence[Segment]) -> str:
    """A file of SubRip."""
    return "".join(
        f"{number}\n{_span(own, ',')}\n{_line(own.text).replace('-->', '->')}\n\n"
        for number, own in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """A file of WebVTT, whose text has characters of markup escaped."""
    cues = (
        f"{_span(own, '.')}\n{html.escape(_line(own.text), quote=False)}\n\n" for own in segments
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

"""The segments of a transcript: what lies between the times in an answer's tokens.

Source of the form of answers: Radford et al., 2022, "Robust Speech Recognition via Large-Scale Weak
Supervision", section 2.3: a token for its begin stands before a segment, one for its end behind it.
"""

import html
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # which imports transformers
    from rayfin.actors.media.whisper import SpeechPrompts


class Span(NamedTuple):
    """A segment of one clip."""

    start: float  # seconds in the clip
    end: float
    tokens: list[int]  # those of its times among them


class Segment(BaseModel):
    """A segment of a recording, with the members that OpenAI's have."""

    id: int
    seek: int  # hundredths of a second: where the clip begins in the recording
    start: float  # seconds in the recording
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: None = None  # not measured
    compression_ratio: float  # of the text of the whole clip: its bytes over those of zlib
    no_speech_prob: None = None  # not measured


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
    found: list[Span] = []
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
            found.append(Span(start, time, [*held, token]))
        held, said, start = [] if said else [token], False, time
    if said:
        found.append(Span(start, length, held))
    return found


def segments(
    answers: Sequence[Sequence[int]],
    lengths: Sequence[float],
    speech: "SpeechPrompts",
    tokenizer: Tokenizer,
    temperature: float,
) -> list[Segment]:
    """The segments of a recording in order; those without text are left out.

    Args:
        answers: the tokens of each clip's transcript.
        lengths: of the clips, seconds.
    """
    made: list[Segment] = []
    begin = 0.0  # of the clip in the recording, seconds
    for answer, length in zip(answers, lengths, strict=True):
        # In a folder of someone's own times may be special tokens.
        words = [
            token
            for token in answer
            if token not in tokenizer.special_token_ids or speech.seconds(token) is not None
        ]
        ratio = _compression(_text(words, speech, tokenizer))
        for span in spans(words, speech.seconds, length):
            text = _text(span.tokens, speech, tokenizer)
            if not text.strip():
                continue
            made.append(
                Segment(
                    id=len(made),
                    seek=round(begin * 100),
                    start=round(begin + span.start, 3),
                    end=round(begin + span.end, 3),
                    text=text,
                    tokens=span.tokens,
                    temperature=temperature,
                    compression_ratio=ratio,
                )
            )
        begin += length
    return made


def _text(tokens: Iterable[int], speech: "SpeechPrompts", tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token for token in tokens if speech.seconds(token) is None])


def _compression(text: str) -> float:
    written = text.encode()
    return len(written) / len(zlib.compress(written))


# Segments as files of subtitles: SubRip, and WebVTT (https://www.w3.org/TR/webvtt1).


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

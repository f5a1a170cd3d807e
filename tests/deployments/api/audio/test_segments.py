"""Tokens of an answer to segments, and segments to files of subtitles."""

import pytest

from rayfin.deployments.api.audio.segments import Segment, sentences, spans, srt, vtt

LENGTH = 3.0
A, B, C = 1, 2, 3


def at(seconds: float) -> int:
    return 1000 + round(seconds * 50)


def seconds(token: int) -> float | None:
    return round((token - 1000) / 50, 2) if token >= 1000 else None


CASES: dict[str, tuple[list[int], list[tuple[float, float, list[int]]]]] = {
    "pairs": (
        [at(0), A, at(1), at(1), B, C, at(2.5)],
        [(0.0, 1.0, [at(0), A, at(1)]), (1.0, 2.5, [at(1), B, C, at(2.5)])],
    ),
    "a pause": (
        [at(0.5), A, at(1), at(2), B, at(2.5)],
        [(0.5, 1.0, [at(0.5), A, at(1)]), (2.0, 2.5, [at(2), B, at(2.5)])],
    ),
    "cut off": (
        [at(0), A, at(1), at(1.2), B],
        [(0.0, 1.0, [at(0), A, at(1)]), (1.2, LENGTH, [at(1.2), B])],
    ),
    "a begin alone": ([at(0), A, at(1), at(1)], [(0.0, 1.0, [at(0), A, at(1)])]),
    "no times": ([A, B], [(0.0, LENGTH, [A, B])]),
    "no begin": ([A, at(1), B], [(0.0, 1.0, [A, at(1)]), (1.0, LENGTH, [B])]),
    "backwards": (
        [at(2), A, at(1), at(0), B, at(0.5)],
        [(2.0, 2.0, [at(2), A, at(1)]), (2.0, 2.0, [at(0), B, at(0.5)])],
    ),
    "past the clip": ([at(1), A, at(29)], [(1.0, LENGTH, [at(1), A, at(29)])]),
    "all past the clip": ([at(28), A], [(LENGTH, LENGTH, [at(28), A])]),
    "only times": ([at(0), at(1), at(2)], []),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", CASES)
def test_spans(name: str) -> None:
    tokens, found = CASES[name]
    assert spans(tokens, seconds, LENGTH) == found


WHOLE: dict[str, tuple[list[int], int, float, bool]] = {
    # tokens, sentences that are whole, where the last one ends, whether more follows
    "a begin behind the end": ([at(0), A, at(1), at(1)], 1, 1.0, True),
    "an end alone": ([at(0), A, at(1), at(1), B, at(2)], 2, 2.0, False),
    "one without an end": ([at(0), A, at(1), at(1.2), B, C], 1, 1.0, True),
    "nothing but that": ([at(0), A, B], 1, LENGTH, False),
    "nothing": ([], 0, LENGTH, False),
    "past the window": ([at(0), A, at(9), at(9)], 1, LENGTH, True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_sentences(name: str) -> None:
    tokens, count, end, goes_on = WHOLE[name]
    whole = sentences(tokens, seconds, LENGTH)
    assert (len(whole.spans), whole.end, whole.goes_on) == (count, end, goes_on)
    assert whole.spans == spans(tokens, seconds, LENGTH)[:count]


def segment(number: int, start: float, end: float, text: str) -> Segment:
    return Segment(
        id=number,
        seek=0,
        start=start,
        end=end,
        text=text,
        tokens=[],
        temperature=0.0,
        avg_logprob=-0.5,
        compression_ratio=1.0,
        no_speech_prob=0.0,
    )


TWO = [segment(0, 0.0, 1.5, " Hello\n\nyou."), segment(1, 3661.0, 36000.0, "a --> b & <c>")]


def test_srt() -> None:
    assert srt(TWO) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello you.\n\n"
        "2\n01:01:01,000 --> 10:00:00,000\na -> b & <c>\n\n"
    )
    assert srt([]) == ""


def test_vtt() -> None:
    assert vtt(TWO) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello you.\n\n"
        "01:01:01.000 --> 10:00:00.000\na --&gt; b &amp; &lt;c&gt;\n\n"
    )
    assert vtt([]) == "WEBVTT\n\n"

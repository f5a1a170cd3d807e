"""Transcripts of clips become one text, in the order of the clips."""

import pytest

from rayfin.deployments.api.audio.transcript import HeardText, JoinedText


def joined(count: int, mark: str = "") -> JoinedText:
    return JoinedText([HeardText(mark) for _ in range(count)])


@pytest.mark.parametrize(
    ("texts", "whole"),
    [
        (["Hello.", "How are you?"], "Hello. How are you?"),
        ([" Hello. ", " How", " Fine "], " Hello. How Fine "),
        (["今天", "天气好。", "OK"], "今天天气好。OK"),
        (["สวัสดี", "ครับ"], "สวัสดีครับ"),
        (["안녕", "하세요"], "안녕 하세요"),
        (["one", "", "  ", "two"], "one two"),
        (["", "two"], "two"),
        (["one\n", "two"], "one\ntwo"),
    ],
)
def test_a_space_where_the_script_has_one(texts: list[str], whole: str) -> None:
    own = joined(len(texts))
    sent = [own.push(clip, text, last=True) for clip, text in enumerate(texts)]
    assert "".join(sent) == own.text == whole


def test_later_clips_wait() -> None:
    """Whatever comes first, the pieces go out in the order of the clips."""
    own = joined(3)
    assert own.push(0, "a") == "a"
    assert own.push(2, "e", last=True) == ""
    assert own.push(1, " ") == "" and own.push(1, "c") == ""
    assert own.push(0, "b") == "b"
    assert own.push(0, "", last=True) == " c"
    assert own.push(1, "d") == "d" and own.push(1, "", last=True) == " e"
    assert own.text == "ab cd e"


def test_languages() -> None:
    own = joined(2, "<asr_text>")
    own.push(1, "language German<asr_text>Tag", last=True)
    assert own.language == "German" and own.text == ""
    assert own.push(0, "language None<asr_text>Hm", last=True) == "Hm Tag"
    assert own.language == "German"
    silent = joined(1, "<asr_text>")
    assert silent.push(0, "language None<asr_text>", last=True) == ""
    assert silent.language is None

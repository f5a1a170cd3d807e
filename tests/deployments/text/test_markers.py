"""Parts that are no text keep their places through templates and tokenizers."""

import copy
from typing import Any

import pytest
from tokenizers import AddedToken

from rayfin.deployments.text.chat_template import HistoryStyle, render_chat
from rayfin.deployments.text.markers import Marked
from rayfin.deployments.text.tokenizer import Tokenizer

CASES: list[list[str | None]] = [
    [None],
    ["hello", None, "world"],
    [None, " hello"],
    ["hello ", None, None, "\nworld\n\n", None],
    ["hello", None, "\n\n\n"],
]
JOINED = "{% for m in messages %}{{ m.content | join('', attribute='text') }}{% endfor %}"
PLACE = "<place>"


def written(case: list[str | None], text: str | None = None) -> list[dict[str, Any]]:
    """A message with parts, or with a text in their places."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": each}
        if each is not None
        else ({"type": "other", "data": 1} if text is None else {"type": "text", "text": text})
        for each in case
    ]
    return [{"role": "user", "content": parts}]


def rendered(tokenizer: Tokenizer, case: list[str | None]) -> list[int]:
    marked = Marked(written(case), "other")
    return render_chat(
        tokenizer,
        marked.messages,
        add_generation_prompt=False,
        chat_template=JOINED,
        history=HistoryStyle(content="openai"),
        marked=marked,
    )


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_around_an_added_token(case: list[str | None], byte_level: Tokenizer) -> None:
    inner: Any = copy.deepcopy(byte_level.inner)
    inner.add_tokens([AddedToken(PLACE, special=False, normalized=False)])
    place, number = inner.convert_tokens_to_ids(PLACE), 0
    expected = inner.apply_chat_template(
        written(case, PLACE), chat_template=JOINED, return_dict=False
    )
    for at, token in enumerate(expected):
        if token == place:
            number += 1
            expected[at] = -number
    assert rendered(byte_level, case) == expected


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_sentencepiece_puts_no_space_behind_a_part(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = rendered(tokenizer, ["hello", None, "hello"])
    at = ids.index(-1)
    space = tokenizer.backend.token_to_id("▁")
    assert at > 0 and space not in ids[at + 1 :]
    assert tokenizer.strings(ids[at + 1 :]) == ["h", "e", "l", "l", "o"]
    with_space = rendered(tokenizer, [None, " hello"])
    assert tokenizer.strings(with_space[1:])[0].startswith("▁")


def test_messages_stay_as_they_are() -> None:
    sent = written(["a", None])
    marked = Marked(sent, "other")
    assert sent == written(["a", None]) and marked.messages is not sent
    assert [(part.path, part.part["data"]) for part in marked.parts] == [
        ("messages[0].content[1]", 1)
    ]
    text = marked.messages[0]["content"][1]["text"]
    assert marked.without(f"b{text}c") == "bc" and marked.cut(f"b{text}c") == ["b", "0", "c"]


@pytest.mark.parametrize(
    "messages", [None, 5, "a", [5], [{"content": 5}], [{"content": [5, None]}]]
)
def test_anything_may_be_marked(messages: Any) -> None:
    marked = Marked(messages, "other")
    assert marked.parts == [] and marked.messages == messages

"""Anthropic's messages as chat messages."""

from typing import Any

import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.anthropic.conversation import chat_messages, is_continued

THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "anything"}
TEXT = {"type": "text", "text": "look"}


def used(name: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"id_{name}", "name": name, "input": given}


def result(name: str, content: Any = "5", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"id_{name}", "content": content, **more}


def call(name: str, **given: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": given}
    return {"type": "function", "id": f"id_{name}", "function": function}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def test_a_round_of_calls() -> None:
    chat = chat_messages(
        [
            {"role": "user", "content": "hello"},
            turn("assistant", THOUGHT, TEXT, used("f", a=1), used("g")),
            turn("user", TEXT, result("g", [TEXT, TEXT]), result("f")),
        ],
        "Be brief.",
    )
    assert chat == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "look",
            "reasoning_content": "hm",
            "tool_calls": [call("f", a=1), call("g")],
        },
        {"role": "tool", "tool_call_id": "id_g", "content": "look\nlook"},
        {"role": "tool", "tool_call_id": "id_f", "content": "5"},
        {"role": "user", "content": "look"},  # after the results, wherever it stood
    ]
    assert not is_continued(chat)


def test_a_tool_may_give_images() -> None:
    """Its parts keep their order; an error is said before them."""
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    for failed, before in ((False, []), (True, [{"type": "text", "text": "Error:"}])):
        shown = turn("user", result("f", [TEXT, image], is_error=failed))
        chat = chat_messages([turn("assistant", used("f")), shown], None)
        assert chat[-1]["role"] == "tool"
        assert chat[-1]["content"] == [*before, {"type": "text", "text": "look"}, image]
        assert chat[-1]["content"][-1].path == "messages[1].content[0].content[1]"


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result("f", None), ""),
        (result("f", []), ""),
        (result("f", ""), ""),
        (result("f", is_error=False), "5"),
        (result("f", "no such city", is_error=True), "Error: no such city"),
    ],
)
def test_results(block: dict[str, Any], content: str) -> None:
    chat = chat_messages([turn("assistant", used("f")), turn("user", block)], None)
    assert chat[-1] == {"role": "tool", "tool_call_id": "id_f", "content": content}


def test_neighbours_are_one_message() -> None:
    chat = chat_messages(
        [
            turn("assistant", THOUGHT, TEXT),
            turn("assistant", used("f")),
            turn("assistant", TEXT, used("g")),
            turn("user", result("f")),
            turn("user", result("g")),
            turn("user", TEXT),
            {"role": "user", "content": "on"},
        ],
        None,
    )
    assert chat[0] == {
        "role": "assistant",
        "content": "look\nlook",
        "reasoning_content": "hm",
        "tool_calls": [call("f"), call("g")],
    }
    assert [message["role"] for message in chat] == ["assistant", "tool", "tool", "user"]
    assert chat[-1]["content"] == "look\non"


def test_thinking_that_another_model_has_hidden_is_left_out() -> None:
    hidden = {"type": "redacted_thinking", "data": "xxxx"}
    chat = chat_messages([turn("assistant", hidden, TEXT), turn("user", TEXT)], None)
    assert chat[0] == {"role": "assistant", "content": "look"}


def test_a_message_without_blocks_is_none() -> None:
    chat = chat_messages([turn("user", TEXT), turn("system"), turn("user", TEXT)], None)
    assert chat == [{"role": "user", "content": "look\nlook"}]
    with pytest.raises(InvalidRequest, match="must not be empty"):
        chat_messages([turn("user")], None)


def test_the_start_of_an_answer() -> None:
    chat = chat_messages([turn("user", TEXT), turn("assistant", THOUGHT, TEXT)], None)
    assert is_continued(chat) and chat[-1]["reasoning_content"] == "hm"


def test_calls_without_results_are_no_start_of_an_answer() -> None:
    with pytest.raises(InvalidRequest) as error:
        chat_messages([turn("user", TEXT), turn("assistant", TEXT, used("f"))], None)
    assert error.value.param == "messages[1].content"
    assert chat_messages([turn("assistant", used("f"))], None, is_part=True)  # up to a mark


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "data": "a"}}, "a"),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {"type": "content", "content": [TEXT, TEXT]},
            },
            "T\nC\nlook\nlook",
        ),
        ({"type": "search_result", "title": "T", "source": "S", "content": [TEXT]}, "T\nS\nlook"),
    ],
)
def test_documents_of_text_are_text(block: dict[str, Any], text: str) -> None:
    chat = chat_messages([turn("user", block, TEXT)], None)
    assert chat == [{"role": "user", "content": f"{text}\nlook"}]
    chat = chat_messages([turn("assistant", used("f")), turn("user", result("f", [block]))], None)
    assert chat[-1]["content"] == text

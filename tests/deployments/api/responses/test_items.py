"""Items of a conversation, as a chat template reads them and as truncation cuts them."""

from typing import Any

from rayfin.deployments.api.responses.items import (
    addresses_of,
    chat_messages,
    input_items,
    texts_of,
)
from rayfin.deployments.api.responses.prompt import cuts

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "look"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}


def called(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments}


def output(call_id: str, value: Any = "5") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"type": "function", "id": call_id, "function": function}


def chat(*items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return chat_messages(input_items(list(items)), instructions)


def test_a_round_of_calls() -> None:
    said = chat(
        USER,
        THOUGHT,
        SAID,
        called("a", '{"x": 1}'),
        called("b"),
        output("b", [{"type": "input_text", "text": "1"}, {"type": "output_text", "text": "2"}]),
        output("a"),
        THOUGHT,
        called("c"),
        output("c"),
        SAID,
        instructions="Be brief.",
    )
    assert said == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "look",
            "reasoning_content": "hm",
            "tool_calls": [call("a", '{"x": 1}'), call("b")],
        },
        {"role": "tool", "tool_call_id": "b", "content": "1\n2"},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
        {"role": "assistant", "content": "look"},
    ]


def test_a_function_may_give_images() -> None:
    """Its parts keep their order, and images their paths."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    items = input_items([called("a"), output("a", [{"type": "input_text", "text": "see"}, image])])
    (tool,) = [said for said in chat_messages(items, None) if said["role"] == "tool"]
    text, shown = tool["content"]
    assert text == {"type": "text", "text": "see"}
    assert (shown["type"], shown["image_url"]) == ("input_image", image["image_url"])
    assert shown.path == "input[1].output[1]"
    assert addresses_of(items[1]) == [image["image_url"]] and texts_of(items[1]) == ["see"]


def test_messages_stay_apart() -> None:
    assert chat(SAID, SAID, THOUGHT, THOUGHT, SAID) == [
        {"role": "assistant", "content": "look"},
        {"role": "assistant", "content": "look"},
        {"role": "assistant", "content": "look", "reasoning_content": "hm\nhm"},
    ]


def test_reasoning_of_other_servers() -> None:
    """A summary stands for what cannot be read; without one there is nothing."""
    summary = [{"type": "summary_text", "text": "in short"}]
    hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xxxx"}
    assert chat({**hidden, "summary": summary}, SAID)[0]["reasoning_content"] == "in short"
    assert chat(hidden, SAID) == [{"role": "assistant", "content": "look"}]


def test_ids_are_kept_or_made() -> None:
    items = [{**item, "id": "mine"} for item in (USER, THOUGHT, called("a"), output("a"))]
    assert [item.id for item in input_items(items)] == ["mine"] * 4
    made = input_items([USER, THOUGHT, called("a"), output("a")])
    assert [item.id.split("_")[0] for item in made] == ["msg", "rs", "fc", "fco"]


def test_where_a_conversation_may_be_cut() -> None:
    """Before a user's message, but not between a call and its output."""
    items = [USER, SAID, USER, called("a"), USER, output("a"), USER, called("a"), output("a"), USER]
    assert cuts(input_items(items)) == [2, 6, 9]
    assert cuts(input_items([USER])) == [] == cuts([])

"""Earlier tool calls and thoughts, as templates want them."""

import re
from typing import Any

import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.tools import declared_tools
from rayfin.deployments.text.generation_prompt import opening_text
from rayfin.deployments.text.messages import plain_messages
from rayfin.deployments.text.parsing.format import IdStyle
from rayfin.deployments.text.tokenizer import Tokenizer

BROKEN = '{"city": "Par'


def history(*ids: str | None, arguments: Any = '{"city":  "Paris"}') -> list[dict[str, Any]]:
    """A question, calls with the given ids, and their results."""
    calls = [
        {"id": made, "type": "function", "function": {"name": "get", "arguments": arguments}}
        for made in ids
    ]
    results = [{"role": "tool", "tool_call_id": made, "content": "9"} for made in ids if made]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    return [{"role": "user", "content": "?"}, call, *results]


@pytest.mark.parametrize(
    ("arguments", "as_text", "expected"),
    [
        ('{"city":  "Paris"}', False, {"city": "Paris"}),
        ('{"city":  "Paris"}', True, '{"city":  "Paris"}'),
        ({"city": "Köln"}, True, '{"city": "Köln"}'),
        ("", True, "{}"),
        (None, False, {}),
        (BROKEN, False, BROKEN),
        (BROKEN, True, BROKEN),
        ("[1]", False, "[1]"),
    ],
)
def test_arguments_are_what_the_template_takes(
    arguments: Any, as_text: bool, expected: object
) -> None:
    messages = plain_messages(history("a", arguments=arguments), arguments_as_text=as_text)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("style", "form"), [("mistral", r"[A-Za-z0-9]{9}"), ("kimi", r"functions\.get:[01]")]
)
def test_foreign_ids_are_replaced_in_calls_and_results(style: IdStyle, form: str) -> None:
    messages = plain_messages(history("call_1", "call_2"), id_style=style)
    calls = [call["id"] for call in messages[1]["tool_calls"]]
    assert len(set(calls)) == 2 and all(re.fullmatch(form, made) for made in calls)
    assert [message["tool_call_id"] for message in messages[2:]] == calls
    again = plain_messages(history(*calls), id_style=style)
    assert [call["id"] for call in again[1]["tool_calls"]] == calls
    plain = plain_messages(history("call_1", "call_2"))
    assert [call["id"] for call in plain[1]["tool_calls"]] == ["call_1", "call_2"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_has_both_names(name: str) -> None:
    (message,) = plain_messages([{"role": "assistant", "content": "4", name: "2 + 2"}])
    assert message["reasoning"] == message["reasoning_content"] == "2 + 2"


def test_tools_over_the_limit_are_refused() -> None:
    function = {"name": "f", "description": "x" * 300_000}
    with pytest.raises(InvalidRequest) as error:
        declared_tools([{"type": "function", "function": function}])
    assert (error.value.param, error.value.code) == ("tools", "string_above_max_length")


@pytest.mark.parametrize("thinks", [True, False])
def test_what_the_template_puts_into_the_models_mouth(byte_level: Tokenizer, thinks: bool) -> None:
    """It is found once for all conversations, and again where a conversation changes it."""
    rendered: list[Any] = []

    def render(messages: Any, added: bool) -> list[int]:
        rendered.append(messages)
        text = "".join(f"<|im_start|>{message['content']}<|im_end|>" for message in messages)
        close = "</think>" if messages[-1]["content"] == "/no_think" else ""
        return byte_level.encode(text + f"<|im_start|>a{'<think>' * thinks}{close}" * added)

    key = f"thinks {thinks}"
    long = [{"content": "hello </think> <think>"}, {"content": "world"}]
    for _ in range(3):
        ids = render(long, True)
        found = opening_text(byte_level, ids, long, render, key)
        assert found == f"<|im_start|>a{'<think>' * thinks}"
    assert len(rendered) == 5
    quiet = [{"content": "/no_think"}]
    found = opening_text(byte_level, render(quiet, True), quiet, render, key)
    assert found == f"<|im_start|>a{'<think>' * thinks}</think>"

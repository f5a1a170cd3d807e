"""Tools that are sent again are the same objects, so that their grammars are made once."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from rayfin.deployments.api.anthropic.bodies import MessagesRequest
from rayfin.deployments.api.anthropic.tools import answer_rules as rules_of_a_message
from rayfin.deployments.api.openai.bodies import ChatCompletionRequest
from rayfin.deployments.api.responses.bodies import ResponseRequest
from rayfin.deployments.api.responses.tools import answer_rules as rules_of_a_response
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.guidance.tools import declared_tools
from rayfin.deployments.text.messages import plain_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def of_a_chat(name: str) -> AnswerRules:
    function = {"name": name, "parameters": SCHEMA}
    return ChatCompletionRequest(tools=[{"type": "function", "function": function}]).answer_rules()


def of_a_response(name: str) -> AnswerRules:
    tool = {"type": "function", "name": name, "parameters": SCHEMA}
    return rules_of_a_response(ResponseRequest(tools=[tool]))


def of_a_message(name: str) -> AnswerRules:
    return rules_of_a_message(MessagesRequest(tools=[{"name": name, "input_schema": SCHEMA}]))


@pytest.mark.parametrize(
    ("rules", "path"),
    [
        (of_a_chat, "tools[0].function.parameters"),
        (of_a_response, "tools[0].parameters"),
        (of_a_message, "tools[0].input_schema"),
    ],
)
def test_the_same_tools(rules: Callable[[str], Any], path: str) -> None:
    (tool,), (again,), (other,) = rules("f").tools, rules("f").tools, rules("g").tools
    assert tool is again and tool is not other
    assert (tool.name, tool.parameters, tool.path) == ("f", SCHEMA, path)


BODIES: list[Any] = [
    ChatCompletionRequest(tools=[{"type": "function", "function": {"name": "f", "strict": True}}]),
    ResponseRequest(tools=[{"type": "function", "name": "f", "strict": True}]),
    MessagesRequest(tools=[{"name": "f", "input_schema": {"type": "object"}, "strict": True}]),
]


@pytest.mark.parametrize("body", BODIES, ids=["chat", "response", "message"])
def test_what_templates_see_of_the_same_tools(body: Any) -> None:
    """It is read and checked once; ``strict`` is in it only if the client sent a chat."""
    shown = body.declared_tools.shown
    again = type(body)(tools=body.tools).declared_tools
    assert again.shown is shown and plain_tools(shown) is shown
    assert [tool["function"]["name"] for tool in shown] == ["f"]
    assert ("strict" in shown[0]["function"]) == isinstance(body, ChatCompletionRequest)
    assert again.functions[0].strict


@pytest.mark.parametrize("kind", [ChatCompletionRequest, ResponseRequest, MessagesRequest])
def test_no_tools(kind: Any) -> None:
    assert kind().declared_tools.shown is None and kind().declared_tools.functions == ()


def test_tools_that_differ_only_in_their_order_or_kind_of_number_are_others() -> None:
    def shown(**schema: Any) -> Any:
        return declared_tools(
            [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        ).shown[0]["function"]["parameters"]

    assert list(shown(a={}, b={})) == ["a", "b"] and list(shown(b={}, a={})) == ["b", "a"]
    values = [1, 1.0, True, "1", None]
    assert [type(shown(const=value)["const"]) for value in values] == list(map(type, values))


def test_what_is_found_in_tools_is_kept() -> None:
    function = {"name": "f", "description": "say <|end|>", "parameters": {"<|key|>": {}}}
    tools = plain_tools([{"type": "function", "function": function}])
    end, key, none = (re.compile(re.escape(text)) for text in ("<|end|>", "<|key|>", "<|no|>"))
    assert (tools.find(end), tools.find(key), tools.find(none)) == (
        (True, False),
        (False, True),
        (False, False),
    )
    assert tools.find(end) is tools.find(end)
    texts = ("type", "function", "name", "description", "parameters", "<|key|>")
    assert tools.characters >= sum(map(len, ("function", "f", "say <|end|>", *texts)))

"""Tools that are sent again are the same objects, so that their grammars are made once."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.deployments.api.anthropic.bodies import MessagesRequest
from rayfin.deployments.api.anthropic.tools import answer_rules as rules_of_a_message
from rayfin.deployments.api.openai.bodies import ChatCompletionRequest
from rayfin.deployments.api.responses.bodies import ResponseRequest
from rayfin.deployments.api.responses.tools import answer_rules as rules_of_a_response
from rayfin.deployments.generation.plan import AnswerRules

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

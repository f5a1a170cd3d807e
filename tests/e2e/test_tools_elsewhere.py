"""The demo model calls its weather tool over Responses and Messages, by their own clients."""

import json
from typing import Any

import anthropic
import pytest

QUESTION = "What is the weather in Paris?"
RESULT = '{"temperature": 18, "conditions": "sunny"}'
ANSWER = "It is sunny in Paris, 18 degrees."
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
ABOUT = {"name": "get_weather", "description": "Get the current weather for a city."}


@pytest.mark.parametrize("background", [False, True])
def test_responses(app: Any, client: Any, background: bool) -> None:
    """Streamed, by reference; a response in the background is read again to the same items."""
    tool = {"type": "function", **ABOUT, "parameters": SCHEMA, "strict": True}
    asked = {"model": app.model, "tools": [tool], "temperature": 0, "background": background}
    with client.responses.stream(input=QUESTION, **asked) as events:
        pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        first = events.get_final_response()
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments) == {"city": "Paris"} and "".join(pieces) == call.arguments
    assert client.responses.retrieve(first.id).output[0].call_id == call.call_id
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    with client.responses.stream(input=[output], previous_response_id=first.id, **asked) as events:
        assert events.get_final_response().output_text == ANSWER


def test_messages(app: Any) -> None:
    asked: Any = {
        "model": app.model,
        "tools": [{**ABOUT, "input_schema": SCHEMA}],
        "max_tokens": 60,
        "extra_body": {"temperature": 0},
    }
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=app.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(messages=said, **asked) as events:
            first = events.get_final_message()
        (used,) = first.content
        assert (first.stop_reason, used.name) == ("tool_use", "get_weather")
        assert used.input == {"city": "Paris"}
        result = {"type": "tool_result", "tool_use_id": used.id, "content": RESULT}
        said += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        last = client.messages.create(messages=said, **asked)
    assert (last.content[0].text, last.stop_reason) == (ANSWER, "end_turn")

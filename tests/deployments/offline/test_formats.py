"""Every format of calls from its grammar through the demo model to the parser."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from rayfin import LLM, SamplingParams
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.rows import TOOL_FORMATS

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "now": {"type": "boolean"},
    },
    "required": ["city", "days", "now"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS, "strict": True}
OTHER = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (FUNCTION, OTHER)]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", threads=1, kv_cache_memory=32 * 1024**2) as own:
        yield own


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_forced_call(llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, choice: Any) -> None:
    """Drawn: each call that was not cut has its form, and nothing is left as content."""
    monkeypatch.setitem(llm.__dict__, "_formats", Detected(tools=TOOL_FORMATS[name]))
    params = SamplingParams(temperature=1, seed=3, n=2 if choice == NAMED else 1, max_tokens=600)
    answers = llm.chat(QUESTION, params, tools=TOOLS, tool_choice=choice, use_tqdm=False)
    whole = 0
    for answer in answers[0].outputs:
        assert answer.text == "", answer
        for call in answer.tool_calls:
            whole += 1
            function = call["function"]
            arguments = json.loads(function["arguments"])
            if function["name"] == "get_weather":
                jsonschema.validate(arguments, PARAMETERS)
            else:
                assert function["name"] == "get_time" and choice == "required" and arguments == {}
        if choice == NAMED and answer.finish_reason == "stop":
            assert len(answer.tool_calls) == 1
    assert whole

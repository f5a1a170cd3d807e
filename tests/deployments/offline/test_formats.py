"""Every format of calls from its grammar through the demo model to the parser."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from tiers import few
from wary import Wary, animals

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


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *((name, NAMED) for name in TOOL_FORMATS),
        *few([(name, "required") for name in TOOL_FORMATS], 8),
    ],
)
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


@pytest.mark.parametrize("refused", [('"zebra"',), ('"zebra"', '"yak"')], ids=["one", "both"])
def test_refused_schemas_are_given_up_as_in_the_server(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: tuple[str, ...],
) -> None:
    """Those that are too much, or all if only together they are; never strict ones."""
    monkeypatch.setattr(llm, "_checker", Wary(llm._text_side(), *refused))
    params = SamplingParams(temperature=0, max_tokens=48)

    def ask(*strict: str) -> Any:
        tools = animals(*strict)
        return llm.chat(QUESTION, params, tools=tools, tool_choice="required", use_tqdm=False)

    assert ask()[0].outputs[0].token_ids
    given_up = ["tools[0].function.parameters", "tools[1].function.parameters"][: len(refused)]
    assert [record.args[1] for record in caplog.records] == [", ".join(given_up)]
    assert ask("yak")[0].outputs[0].token_ids
    with pytest.raises(InvalidRequest) as caught:
        ask("zebra", "yak")
    param = "tools[0].function.parameters" if len(refused) == 1 else "tools"
    assert (caught.value.param, caught.value.code) == (param, "schema_too_complex")


def test_a_schema_that_cannot_be_held_is_refused_if_strict(llm: LLM) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    params = SamplingParams(temperature=0, max_tokens=8)
    for strict in (False, True):
        function = {"name": "f", "parameters": parameters, "strict": strict}
        tools = [{"type": "function", "function": function}]
        if not strict:
            assert llm.chat(QUESTION, params, tools=tools, use_tqdm=False)[0].outputs
            continue
        with pytest.raises(InvalidRequest) as caught:
            llm.chat(QUESTION, params, tools=tools, use_tqdm=False)
        assert caught.value.code == "unsupported_schema"
        assert caught.value.param == "tools[0].function.parameters.properties.a.uniqueItems"

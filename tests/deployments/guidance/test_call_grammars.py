"""Grammars of tool calls take what models of each row write, and nothing else."""

import json
from typing import Any

import pytest

from call_walks import Walker, byte_tokenizer, tokens_of
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.runner.parts.grammars.guided_row import Phase
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.calls import CallRules, build_guidance, make_call_rules
from rayfin.deployments.guidance.grammar import make_grammar
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.guidance.tools import Tool
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.parsing.render import WrittenCall, render_calls

PATH = "tools[0].function.parameters"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
        "now": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["city", "days"],
}
TOOLS = (Tool("get_weather", WEATHER, path=PATH), Tool("get", path="tools[1]"))
FULL = {"city": "Paris", "days": 7, "unit": "c", "now": True, "note": "x", "tags": ["a", "b"]}
CALLS = [WrittenCall("get_weather", FULL), WrittenCall("get", {})]
ROWS = [pytest.param(row, id=name) for name, row in TOOL_FORMATS.items()]
WAYS = [
    pytest.param(ToolChoice("required"), "json", id="required"),
    pytest.param(ToolChoice("required", name="get_weather"), "json", id="named"),
    pytest.param(ToolChoice(), "json", id="auto"),
    pytest.param(ToolChoice(), "schema", id="auto-schema"),
    pytest.param(ToolChoice(parallel=False), "schema", id="auto-one"),
]


@pytest.fixture(params=[True, False], ids=["tokens", "text"])
def has_tokens(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def walker_of(row: ToolFormat, has_tokens: bool) -> Walker:
    return Walker(byte_tokenizer(tokens_of(row) if has_tokens else []))


def takes(walker: Walker, rules: CallRules, text: str) -> bool:
    """Whether the rules let the text pass whole; of a free answer, with a call in it."""
    tokens = walker.tokenizer.encode(text, add_special_tokens=False)
    guidance = build_guidance(grammar=rules.grammar, calls=rules)
    phases = walker.phases(guidance, tokens) if guidance is not None else None
    return phases is not None and Phase.BOUND in phases


@pytest.mark.parametrize(("choice", "guidance"), WAYS)
@pytest.mark.parametrize("row", ROWS)
def test_a_grammar_takes_the_calls_of_its_row(
    row: ToolFormat, has_tokens: bool, choice: ToolChoice, guidance: Any
) -> None:
    walker = walker_of(row, has_tokens)
    one = not choice.parallel or choice.name is not None
    text = render_calls(row, CALLS[:1] if one else CALLS)
    rules = make_call_rules(row, TOOLS, choice, walker.tokenizer, guidance=guidance)
    assert rules.unenforced == ()
    assert rules.forced == (choice.name or "required" if choice.forced else "")
    assert takes(walker, rules, text)


@pytest.mark.parametrize("row", ROWS)
def test_a_forced_call_refuses_what_is_no_call_of_the_request(
    row: ToolFormat, has_tokens: bool
) -> None:
    walker = walker_of(row, has_tokens)
    rules = make_call_rules(row, TOOLS, ToolChoice("required"), walker.tokenizer)
    for call in (
        WrittenCall("get_wind", FULL),
        WrittenCall("get_weather", {**FULL, "days": 10}),
        WrittenCall("get_weather", {"city": "Paris"}),
        WrittenCall("get_weather", {**FULL, "unit": "k"}),
        WrittenCall("get_weather", {**FULL, "wind": 1}),
        WrittenCall("get", {"a": 1}),
    ):
        assert not takes(walker, rules, render_calls(row, [call])), call
    assert not takes(walker, rules, "Sunny.")
    assert not takes(walker, rules, "")


@pytest.mark.parametrize("row", ROWS)
def test_a_free_answer_may_be_text(row: ToolFormat, has_tokens: bool) -> None:
    walker = walker_of(row, has_tokens)
    rules = make_call_rules(row, TOOLS, ToolChoice(), walker.tokenizer)
    texts = ["Sunny. 3 < 4 {not} [a] call", '{"city": 1}', "[1, 2]", ""]
    if row.syntax == "channels":
        texts = [f"<|channel|>final<|message|>{text}" for text in texts]
    for text in texts:
        tokens = walker.tokenizer.encode(text, add_special_tokens=False)
        assert not rules.grammar or walker.accepts(rules.grammar, tokens), text


@pytest.mark.parametrize("row", ROWS)
def test_a_call_in_a_free_answer_has_a_known_name(row: ToolFormat, has_tokens: bool) -> None:
    walker = walker_of(row, has_tokens)
    rules = make_call_rules(row, TOOLS, ToolChoice(), walker.tokenizer)
    text = render_calls(row, [WrittenCall("get_wind", {"a": 1})])
    assert not takes(walker, rules, text)


@pytest.mark.parametrize("row", ROWS)
def test_none_takes_no_call(row: ToolFormat, has_tokens: bool) -> None:
    walker = walker_of(row, has_tokens)
    rules = make_call_rules(row, TOOLS, ToolChoice("none"), walker.tokenizer)
    assert rules.calls is None
    text = render_calls(row, CALLS)
    tokens = walker.tokenizer.encode(text, add_special_tokens=False)
    if rules.grammar:
        assert not walker.accepts(rules.grammar, tokens)
    elif not row.bare:
        assert set(rules.forbidden) & set(tokens)


@pytest.mark.parametrize("row", ROWS)
def test_a_strict_function_is_held_to_its_schema_in_a_free_answer(
    row: ToolFormat, has_tokens: bool
) -> None:
    walker = walker_of(row, has_tokens)
    tools = (Tool("get_weather", WEATHER, True, PATH), TOOLS[1])
    rules = make_call_rules(row, tools, ToolChoice(), walker.tokenizer)
    assert takes(walker, rules, render_calls(row, CALLS[:1]))
    assert takes(walker, rules, render_calls(row, [WrittenCall("get", {"any": 1})]))
    wrong = render_calls(row, [WrittenCall("get_weather", {**FULL, "days": 10})])
    assert not takes(walker, rules, wrong)


def test_calls_or_the_form_of_the_answer() -> None:
    row = TOOL_FORMATS["hermes"]
    walker = walker_of(row, True)
    answer = make_grammar(StructuredOutputs(json={"type": "object", "required": ["a"]}), "x")
    rules = make_call_rules(row, TOOLS, ToolChoice(), walker.tokenizer, answer=answer)
    assert takes(walker, rules, '{"a": 1}')
    assert takes(walker, rules, render_calls(row, CALLS))
    assert not takes(walker, rules, "{}")
    assert not takes(walker, rules, "Sunny.")


def test_a_form_without_calls_is_alone() -> None:
    row = TOOL_FORMATS["hermes"]
    tokenizer = byte_tokenizer(tokens_of(row))
    answer = make_grammar(StructuredOutputs(choice=["a"]), "x")
    for choice, tools in ((ToolChoice("none"), TOOLS), (ToolChoice(), ())):
        rules = make_call_rules(row, tools, choice, tokenizer, answer=answer)
        assert rules == CallRules(answer.text)


@pytest.mark.parametrize(
    "outputs", [StructuredOutputs(regex="a+b"), StructuredOutputs(choice=["aab"])]
)
def test_forms_that_are_no_json_go_beside_calls(outputs: StructuredOutputs) -> None:
    row = TOOL_FORMATS["mistral"]
    walker = walker_of(row, True)
    rules = make_call_rules(
        row, TOOLS, ToolChoice(), walker.tokenizer, answer=make_grammar(outputs, "x")
    )
    assert takes(walker, rules, "aab") and not takes(walker, rules, "b")
    assert takes(walker, rules, render_calls(row, CALLS))


def test_the_form_of_an_answer_is_in_the_final_channel() -> None:
    row = TOOL_FORMATS["openai"]
    walker = walker_of(row, True)
    answer = make_grammar(StructuredOutputs(json={"type": "object", "required": ["a"]}), "x")
    for tools in ((), TOOLS):
        rules = make_call_rules(row, tools, ToolChoice(), walker.tokenizer, answer=answer)
        assert takes(walker, rules, '<|channel|>final<|message|>{"a": 1}')
        before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        assert takes(walker, rules, before + '<|channel|>final<|message|>{"a": 1}')
        assert not takes(walker, rules, "<|channel|>final<|message|>Hm.")


def test_a_recipient_stands_before_or_behind_the_channel() -> None:
    row = TOOL_FORMATS["openai"]
    walker = walker_of(row, True)
    rules = make_call_rules(row, TOOLS, ToolChoice("required"), walker.tokenizer)
    arguments = json.dumps(FULL)
    for head in (
        " to=functions.get_weather<|channel|>commentary json",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        "<|channel|>analysis to=functions.get_weather",
    ):
        assert takes(walker, rules, f"{head}<|message|>{arguments}<|call|>"), head


def test_a_mark_that_ends_the_answer_is_the_runners() -> None:
    row = TOOL_FORMATS["openai"]
    tokenizer = byte_tokenizer(tokens_of(row))
    tokenizer.eos_token_ids |= {tokenizer.added_ids["<|call|>"]}
    rules = make_call_rules(row, TOOLS, ToolChoice("required"), tokenizer)
    assert f"<[{tokenizer.added_ids['<|call|>']}]>" not in rules.grammar
    text = render_calls(row, CALLS[:1]).removesuffix("<|call|>")
    assert takes(Walker(byte_tokenizer(tokens_of(row))), rules, text)


def test_without_a_format_forced_calls_are_json() -> None:
    walker = Walker(byte_tokenizer())
    rules = make_call_rules(None, TOOLS, ToolChoice("required"), walker.tokenizer)
    assert takes(walker, rules, render_calls(TOOL_FORMATS["json"], CALLS))
    named = make_call_rules(
        None, TOOLS, ToolChoice("required", name="get_weather"), walker.tokenizer
    )
    assert named.forced == "get_weather"
    assert takes(walker, named, json.dumps(FULL)) and not takes(walker, named, "{}")
    assert make_call_rules(None, TOOLS, ToolChoice(), walker.tokenizer) == CallRules()


def test_off_has_no_rules_but_for_strict_functions_and_limits() -> None:
    row = TOOL_FORMATS["hermes"]
    tokenizer = byte_tokenizer(tokens_of(row))

    def rules(tool: Tool, choice: ToolChoice) -> CallRules:
        return make_call_rules(row, [tool], choice, tokenizer, guidance="off")

    assert rules(TOOLS[0], ToolChoice()) == CallRules()
    one = rules(TOOLS[0], ToolChoice(parallel=False)).calls
    assert one is not None and one.max_calls == 1
    assert rules(Tool("get", WEATHER, True, PATH), ToolChoice()).calls is not None


def test_allowed_tools_are_the_only_ones() -> None:
    row = TOOL_FORMATS["hermes"]
    walker = walker_of(row, True)
    choice = ToolChoice(allowed=frozenset({"get"}))
    rules = make_call_rules(row, TOOLS, choice, walker.tokenizer)
    assert takes(walker, rules, render_calls(row, CALLS[1:]))
    assert not takes(walker, rules, render_calls(row, CALLS[:1]))


UNWRITTEN = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
    "minProperties": 1,
}


def test_a_schema_that_tags_cannot_hold_is_refused_or_named() -> None:
    row = TOOL_FORMATS["qwen3_coder"]
    tokenizer = byte_tokenizer(tokens_of(row))
    loose = Tool("get", UNWRITTEN, path=PATH)
    rules = make_call_rules(row, [loose], ToolChoice("required"), tokenizer)
    assert rules.unenforced == (PATH,) and rules.grammar
    strict = Tool("get", UNWRITTEN, True, PATH)
    with pytest.raises(InvalidRequest) as caught:
        make_call_rules(row, [strict], ToolChoice("auto"), tokenizer)
    assert (caught.value.param, caught.value.code) == (PATH, "unsupported_schema")

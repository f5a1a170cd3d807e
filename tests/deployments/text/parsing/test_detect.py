"""The formats of chat templates are found by what the templates write."""

import json
import time

import pytest

from call_walks import byte_tokenizer
from chat_templates import CASES, Case
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.generation.prompts import thinking_variables
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from rayfin.deployments.text.parsing.detect import Detected, detect
from rayfin.deployments.text.parsing.events import Piece
from rayfin.deployments.text.parsing.format import thought_start
from rayfin.deployments.text.parsing.parser import OutputParser
from rayfin.deployments.text.parsing.render import WrittenCall, render_calls
from rayfin.deployments.text.parsing.template_probe import TemplateProbe
from rayfin.deployments.text.parsing.trials import read_calls
from rayfin.deployments.text.tokenizer import Tokenizer

ALL = [pytest.param(case, id=name) for name, case in CASES.items()]
DERIVED = [pytest.param(case, id=name) for name, case in CASES.items() if case.tools == "derived"]


def found(case: Case) -> Detected:
    return detect(byte_tokenizer(case.tokens), case.template)


@pytest.mark.parametrize("case", ALL)
def test_a_template_is_its_format(case: Case) -> None:
    detected = found(case)
    assert detected.names == (case.tools, case.reasoning), detected.why
    assert detected.arguments_as_text is case.as_text


@pytest.mark.parametrize("case", ALL)
def test_tokens_do_not_decide(case: Case) -> None:
    """Only what has no other trace: marks that a template never writes."""
    detected = detect(byte_tokenizer(), case.template)
    if "without calls" not in next(name for name, own in CASES.items() if own is case):
        assert detected.names[0] == case.tools, detected.why


@pytest.mark.parametrize("case", ALL)
def test_where_an_answer_starts(case: Case) -> None:
    detected = found(case)
    probe = TemplateProbe(byte_tokenizer(case.tokens), case.template)
    assert thought_start(detected.reasoning, probe.opening()) is case.inside
    off = probe.opening({"enable_thinking": False, "thinking": False})
    if "enable_thinking" in case.template:
        assert not thought_start(detected.reasoning, off)


def test_switches_turn_thinking_on() -> None:
    case = CASES["deepseek v3.1"]
    detected = found(case)
    probe = TemplateProbe(byte_tokenizer(case.tokens), case.template)
    assert thought_start(detected.reasoning, probe.opening({"thinking": True}))


@pytest.mark.parametrize("case", DERIVED)
def test_a_derived_row_reads_what_it_writes(case: Case) -> None:
    row = found(case).tools
    assert row is not None
    calls = [WrittenCall("look", {"where": "home", "depth": 3}), WrittenCall("rest", {})]
    functions = {
        "look": {"properties": {"where": {"type": "string"}, "depth": {"type": "integer"}}},
        "rest": {},
    }
    parser = OutputParser(row, None, functions=functions)
    events = parser.push([Piece(render_calls(row, calls))])
    read, content = read_calls([*events, *parser.finish("stop")])
    assert read == [(call.name, dict(call.arguments)) for call in calls]
    assert not content.strip()


def test_the_demo_model_is_hermes() -> None:
    tokenizer = Tokenizer.load(str(DEMO_FOLDER))
    detected = detect(tokenizer)
    assert detected.names == ("hermes", None)
    assert "hermes" in detected.why and not detected.arguments_as_text


def test_a_name_or_none_instead() -> None:
    case = CASES["qwen3"]
    tokenizer = byte_tokenizer(case.tokens)
    assert detect(tokenizer, case.template, tool_parser="none").tools is None
    named = detect(tokenizer, case.template, tool_parser="qwen3_xml", reasoning_parser="none")
    assert named.names == ("qwen3_coder", None)
    named = detect(tokenizer, case.template, reasoning_parser="deepseek-r1")
    assert named.names == ("hermes", "deepseek_r1")
    with pytest.raises(InvalidConfig, match="tool_call_parser must be one of"):
        detect(tokenizer, case.template, tool_parser="some")


@pytest.mark.parametrize("name", ["mistral, old", "mistral, new"])
def test_one_name_of_vllm_is_both_formats_of_mistral(name: str) -> None:
    case = CASES[name]
    detected = detect(byte_tokenizer(case.tokens), case.template, tool_parser="mistral")
    assert detected.names[0] == case.tools


def test_a_named_row_still_finds_how_arguments_are_given() -> None:
    case = CASES["phi 4 mini"]
    detected = detect(byte_tokenizer(case.tokens), case.template, tool_parser="phi4_mini_json")
    assert detected.arguments_as_text


def test_settings_are_kept() -> None:
    detected = detect(
        byte_tokenizer(),
        CASES["qwen2.5"].template,
        tool_guidance="off",
        reasoning_field="reasoning",
    )
    assert (detected.tool_guidance, detected.reasoning_field) == ("off", "reasoning")


@pytest.mark.parametrize(
    "name, on, off",
    [
        ("minimax m3", {"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
        ("hunyuan 4", {"reasoning_effort": "high"}, {"reasoning_effort": "no_think"}),
        ("kimi k3", {}, {}),
        ("qwen3", {}, {}),
    ],
)
def test_a_template_has_its_own_switch_of_thoughts(
    name: str, on: dict[str, str], off: dict[str, str]
) -> None:
    switch = found(CASES[name]).switch
    assert (switch.on, switch.off) == (on, off)
    thinks, not_at_all = thinking_variables(None, "low"), thinking_variables(None, "none")
    assert switch.added(thinks) == {**on, **thinks}
    assert switch.added(not_at_all) == {**not_at_all, **off}
    assert switch.added({"x": "none"}) == {"x": "none"}
    mine = {"enable_thinking": False, "thinking_mode": "mine", "reasoning_effort": "high"}
    assert switch.added(mine) == mine


BROKEN = [
    "{{ raise_exception('no') }}",
    "{{ messages[7].content }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(999999) %}{{ messages[0].content }}{% endfor %}",
    "{% if",
    "constant",
]


@pytest.mark.parametrize("template", BROKEN)
def test_a_broken_template_has_no_format(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfin.deployments.text.parsing.template_probe.TEMPLATE_SECONDS", 0.05)
    assert detect(byte_tokenizer(), template).names == (None, None)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    "template, writes, row",
    [
        (CHATML, True, "hermes"),
        ("{{ messages | tojson }}", True, "hermes"),
        (NO_SYSTEM, True, "hermes"),
        (SHOWN, False, None),
        ("{% if tools %}{{ raise_exception('none') }}{% endif %}" + CHATML, True, "hermes"),
    ],
)
def test_where_tools_have_a_place(template: str, writes: bool, row: str | None) -> None:
    """A prompt that is the same with tools and without has none."""
    detected = detect(byte_tokenizer(), template)
    assert (detected.writes_tools, detected.names[0]) == (writes, row)
    assert ("no place for tools" in detected.why) is writes
    named = detect(byte_tokenizer(), template, tool_parser="mistral")
    assert (named.writes_tools, named.names[0]) == (writes, "mistral")
    off = detect(byte_tokenizer(), template, tool_parser="none")
    assert (off.writes_tools, off.names[0]) == (False, None)


def test_a_model_without_a_template_has_no_format() -> None:
    assert detect(byte_tokenizer()).names == (None, None)
    assert detect(byte_tokenizer(), tool_parser="hermes").names[0] == "hermes"


def test_history_full_of_marks_is_not_where_an_answer_starts() -> None:
    case = CASES["qwen3 that thinks"]
    row = found(case).reasoning
    assert thought_start(row, "<|im_start|>assistant\n<think>\n")
    assert not thought_start(row, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not thought_start(row, "<|im_start|>assistant\n")
    assert not thought_start(None, "<think>")


def test_detection_is_quick() -> None:
    case = CASES["qwen3"]
    tokenizer = byte_tokenizer(case.tokens)
    detect(tokenizer, case.template)
    before = time.process_time()
    detect(tokenizer, case.template)
    assert time.process_time() - before < 2, json.dumps(case.tokens)

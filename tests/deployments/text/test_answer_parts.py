"""One request's answer through a parser: marks by id, stop strings, what deltas bring."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.choice import ParsedAnswer
from rayfin.deployments.generation.plan import OutputPlan
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.text.output import OutputText, TextDelta
from rayfin.deployments.text.parsing.events import Event
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.parsing.parser import OutputParser
from rayfin.deployments.text.tokenizer import Tokenizer
from toy_parser import ToyParser

CALL = '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}</tool_call>'
ANSWER = f"<think>the END, é</think>Let me look.{CALL}{CALL}"
ARGUMENTS = '{"city": "Paris"}'
EVENTS = [
    Event("reasoning", "the END, é"),
    Event("content", "Let me look."),
    Event("call", index=0, name="f"),
    Event("arguments", ARGUMENTS, 0),
    Event("call_end", index=0),
    Event("call", index=1, name="f"),
    Event("arguments", ARGUMENTS, 1),
    Event("call_end", index=1),
]


@pytest.fixture(scope="module")
def marked(byte_level: Tokenizer) -> Tokenizer:
    """A vocabulary in which the marks of calls are special tokens, and those of thoughts not."""
    backend = Backend.from_str(byte_level.backend.to_str())
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    marks = ("<tool_call>", "</tool_call>")
    backend.add_special_tokens([AddedToken(text, special=True) for text in marks])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"))


def output(tokenizer: Tokenizer, params: SamplingParams, stop_ids: set[int]) -> OutputText:
    rules = StopRules(999, frozenset(stop_ids))
    request = EngineRequest("r", np.array([5], np.int32), Sampling(), rules)
    return OutputText(tokenizer, params, request, ToyParser())  # type: ignore[arg-type]


def read(text: OutputText, ids: list[int], sizes: list[int]) -> TextDelta:
    """Pushes ``ids`` in deltas of the given sizes, the last of which ends the request."""
    whole, rest = TextDelta(), list(ids)
    while not text.finished:
        size = sizes.pop() if sizes else 1
        last = "length" if size >= len(rest) else None
        whole.append(text.push(TokenDelta("r", rest[:size], last)))
        rest = rest[size:]
    return whole


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=20),
    stops=st.sampled_from([None, ["absent"], ["END"], ["}} "]]),
    skip=st.booleans(),
)
def test_an_answer_is_its_parts_however_its_tokens_are_cut(
    marked: Tokenizer, sizes: list[int], stops: list[str] | None, skip: bool
) -> None:
    params = SamplingParams(stop=stops, skip_special_tokens=skip)
    ids = marked.encode(ANSWER)
    whole = read(output(marked, params, set()), ids, sizes)
    assert (whole.events, whole.text, whole.token_ids) == (EVENTS, "Let me look.", ids)
    assert whole.finish_reason == "length"
    assert whole.reasoning_tokens == len(marked.encode("the END, é"))


@pytest.mark.parametrize("sizes", [[], [500]])
def test_a_stop_string_ends_content_and_calls(marked: Tokenizer, sizes: list[int]) -> None:
    ids = marked.encode(ANSWER)
    content = read(output(marked, SamplingParams(stop="look"), set()), ids, list(sizes))
    assert content.events == [EVENTS[0], Event("content", "Let me ")]
    assert (content.finish_reason, content.stop_reason) == ("stop", "look")
    call = read(output(marked, SamplingParams(stop="Paris"), set()), ids, list(sizes))
    assert call.events == EVENTS[:2]


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_may_be_a_mark_that_is_shown(marked: Tokenizer, skip: bool) -> None:
    params = SamplingParams(stop="<tool_call>", skip_special_tokens=skip)
    whole = read(output(marked, params, set()), marked.encode(ANSWER), [])
    assert (whole.stop_reason == "<tool_call>") is not skip
    assert whole.events == (EVENTS if skip else EVENTS[:2])


def test_text_that_looks_like_a_mark_stays_text(marked: Tokenizer) -> None:
    ids = [token for character in CALL for token in marked.encode(character)]
    whole = read(output(marked, SamplingParams(), set()), ids, [])
    assert whole.events == [Event("content", CALL)]


def test_a_mark_that_is_a_stop_token_is_read(marked: Tokenizer) -> None:
    ids = marked.encode(CALL)
    text = output(marked, SamplingParams(), {ids[-1]})
    delta = text.push(TokenDelta("r", ids, "stop", ids[-1]))
    assert [event.kind for event in delta.events] == ["call", "arguments", "call_end"]


def test_half_a_character_before_a_mark_is_shown(marked: Tokenizer) -> None:
    half = marked.encode("é")[:1]
    ids = [*marked.encode("<think>"), *half, *marked.encode("</think>é")]
    whole = read(output(marked, SamplingParams(), set()), ids, [])
    assert whole.events == [Event("reasoning", "\ufffd"), Event("content", "é")]


def test_ids_of_calls() -> None:
    """They follow from the request, the choice and the call alone."""

    def ids(plan: OutputPlan, request_id: str) -> list[str]:
        answer = ParsedAnswer(plan, request_id)
        answer.add(EVENTS, 0)
        return [call.id for call in answer.calls]

    first, other = (ids(OutputPlan(), f"chatcmpl-7-{i}") for i in range(2))
    assert len({*first, *other}) == 4 and first == ids(OutputPlan(), "chatcmpl-7-0")
    assert all(len(made) == 29 and made.startswith("call_") for made in first)
    mistral = ids(OutputPlan(id_style="mistral"), "r")
    assert all(len(made) == 9 and made.isalnum() for made in mistral) and len(set(mistral)) == 2
    kimi = OutputPlan(id_style="kimi", earlier_calls=2)
    assert ids(kimi, "r") == ["functions.f:2", "functions.f:3"]


@pytest.mark.parametrize(
    ("choice", "events", "reason", "expected", "content"),
    [
        (ToolChoice(), EVENTS[2:5], "stop", "tool_calls", None),
        (ToolChoice(), EVENTS[2:5], "length", "length", None),
        (ToolChoice(), EVENTS[2:4], "stop", "stop", ""),
        (ToolChoice(), EVENTS[:1], "length", "length", None),
        (ToolChoice(), [], "stop", "stop", ""),
        (ToolChoice("required"), EVENTS[2:5], "stop", "tool_calls", ""),
        (ToolChoice("required"), [], "length", "length", ""),
        (ToolChoice("required", "f"), EVENTS[2:5], "stop", "stop", ""),
    ],
)
def test_why_an_answer_ended_and_its_content(
    choice: ToolChoice, events: list[Event], reason: str, expected: str, content: str | None
) -> None:
    answer = ParsedAnswer(OutputPlan(choice=choice), "r")
    answer.add(events, 0)
    assert (answer.finish_reason(reason), answer.content("")) == (expected, content)
    assert len(answer.whole_calls) == sum(event.kind == "call_end" for event in events)


@pytest.mark.parametrize("name", ["deepseek_v31", "step3"])
def test_half_a_character_of_a_mark_that_is_cut_is_not_shown(
    byte_level: Tokenizer, name: str
) -> None:
    """Whichever of its tokens is the last one: the marks have characters of three bytes."""
    row = TOOL_FORMATS[name]
    mark = row.section[0] + row.call[0]
    ids = byte_level.encode(f"Hi.{mark}", False)
    head = len(byte_level.encode("Hi.<", False))
    assert len(ids) > head + 10
    for end in range(head, len(ids) + 1):
        parser = OutputParser(row, None, functions={"f": {}})
        request = EngineRequest("r", np.array([5], np.int32), Sampling(), StopRules(999))
        whole = read(OutputText(byte_level, SamplingParams(), request, parser), ids[:end], [])
        assert f"Hi.{mark}".startswith(whole.text), (end, whole.text)

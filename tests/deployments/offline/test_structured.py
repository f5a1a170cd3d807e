"""``SamplingParams(structured_outputs=...)`` in this process."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from rayfin import LLM, SamplingParams, StructuredOutputs
from rayfin.actors.errors import InvalidRequest, NoTokenLeft
from rayfin.deployments.guidance import compile_check

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", threads=1, kv_cache_memory=32 * 1024**2) as own:
        yield own


def ask(llm: LLM, outputs: Any, **settings: Any) -> list[Any]:
    params = SamplingParams(structured_outputs=outputs, max_tokens=120, **settings)
    answers: list[Any] = llm.generate("Anna is", params, use_tqdm=False)[0].outputs
    return answers


def test_drawn_answers_follow_the_schema(llm: LLM) -> None:
    answers = ask(llm, StructuredOutputs(json=SCHEMA), n=8, temperature=1.2, seed=1)
    assert len({own.text for own in answers}) > 1
    for own in answers:
        assert own.finish_reason == "stop"
        jsonschema.validate(json.loads(own.text), SCHEMA)


def test_a_dict_a_pattern_and_a_choice(llm: LLM) -> None:
    (own,) = ask(llm, {"regex": "[a-c]{2}[0-9]{3}"}, temperature=0)
    assert re.fullmatch("[a-c]{2}[0-9]{3}", own.text)
    (own,) = ask(llm, {"choice": ["Rome", "Lima"]}, temperature=0)
    assert own.text in ("Rome", "Lima") and own.stop_reason is None


def test_rules_that_leave_no_token_amid_the_answer_are_named(llm: LLM) -> None:
    (token,) = llm.get_tokenizer().encode("#", add_special_tokens=False)
    params = SamplingParams(allowed_token_ids=[token], bad_words=["##"], max_tokens=3)
    with pytest.raises(NoTokenLeft) as caught:
        llm.generate("Anna is", params, use_tqdm=False)
    assert (caught.value.param, caught.value.status) == ("allowed_token_ids", 400)


def test_a_chat(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"json": SCHEMA}, temperature=0, max_tokens=120)
    messages = [{"role": "user", "content": "Anna is 34 years old and lives in Rome."}]
    (answer,) = llm.chat(messages, params, use_tqdm=False)
    assert json.loads(answer.outputs[0].text) == {"name": "Anna", "age": 34}


def test_each_prompt_may_have_its_own(llm: LLM) -> None:
    forms: list[Any] = [{"choice": ["a"]}, None, {"regex": "[0-9]"}]
    params = [SamplingParams(structured_outputs=form, max_tokens=8) for form in forms]
    first, _, last = llm.generate(["x"] * 3, params, use_tqdm=False)
    assert first.outputs[0].text == "a" and last.outputs[0].text.isdigit()


def test_a_grammar_compiles_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    judge = compile_check.judge
    monkeypatch.setattr(
        compile_check, "judge", lambda own, text: (judged.append(text), judge(own, text))[1]
    )
    params = SamplingParams(structured_outputs={"regex": "once"}, max_tokens=8)
    for _ in range(2):
        for answer in llm.generate(["a", "b", "c"], params, use_tqdm=False):
            assert answer.outputs[0].text == "once"
    assert len(judged) == 1


@pytest.mark.parametrize(
    ("outputs", "param", "code"),
    [
        ({}, "structured_outputs", "invalid_value"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "invalid_value"),
        ({"regex": "(a"}, "structured_outputs.regex", "invalid_schema"),
        ({"json": {"type": "strng"}}, "structured_outputs.json", "invalid_schema"),
        ({"choice": [1]}, "structured_outputs.choice[0]", "invalid_type"),
    ],
)
def test_refused(llm: LLM, outputs: Any, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(llm, outputs)
    assert (caught.value.param or "").startswith(param) and caught.value.code == code
    assert ask(llm, {"choice": ["fine"]})[0].text == "fine"


def test_a_tokenizer_is_needed() -> None:
    with LLM("demo", threads=1, skip_tokenizer_init=True, kv_cache_memory=32 * 1024**2) as bare:
        params = SamplingParams(structured_outputs={"regex": "a"}, detokenize=False)
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            bare.generate([1, 2, 3], params, use_tqdm=False)

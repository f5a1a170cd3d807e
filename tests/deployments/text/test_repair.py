"""Messages that a strict template takes, and the rules of a template, found by rendering."""

from functools import cache, reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from call_walks import byte_tokenizer
from rayfin.deployments.text import repair
from rayfin.deployments.text.generation_prompt import render_prompt
from rayfin.deployments.text.parsing.detect import Detected, detect
from rayfin.deployments.text.repair import TemplateRules, joined, merged, repaired
from rayfin.deployments.text.tokenizer import Tokenizer

USER, SAID = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
SYSTEM, DEVELOPER = {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}
SHOW = "{{ m.role }}:{{ m.content }};"
MISTRAL = (  # calls and their results do not count
    "{% set ns = namespace(user=true) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}" + SHOW + "{% endfor %}"
)


def asks(*names: str) -> dict[str, Any]:
    calls = [{"type": "function", "id": n, "function": {"name": n}} for n in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def gave(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": name}


def shown(messages: list[dict[str, Any]]) -> str:
    return " ".join(
        message["role"][0]
        + "".join(call["id"].upper() for call in message.get("tool_calls", ()))
        + f":{message['content']}"
        for message in messages
    ).replace("\n", "|")


CASES: list[tuple[TemplateRules, list[dict[str, Any]], str, list[str]]] = [
    (TemplateRules(), [USER, SYSTEM, USER], "u:u s:s u:u", []),
    (TemplateRules(system_first=True), [SYSTEM, USER, SAID], "s:s u:u a:a", []),
    (
        TemplateRules(system_first=True),
        [SYSTEM, DEVELOPER, USER, SYSTEM, SAID],
        "s:s|d u:u u:s a:a",
        ["system"],
    ),
    (
        TemplateRules(system_first=True, alternates=True),
        [SYSTEM, USER, SYSTEM, SAID, SAID, USER],
        "s:s u:u|s a:a|a u:u",
        ["system", "turns"],
    ),
    (TemplateRules(no_system=True, alternates=True), [SYSTEM, USER], "u:s|u", ["system", "turns"]),
    (
        TemplateRules(no_results=True, alternates=True),
        [USER, asks("x", "y"), gave("x"), gave("y"), USER],
        "u:u aXY: u:x|y|u",
        ["results", "turns"],
    ),
    (
        TemplateRules(no_user_after_results=True),
        [USER, asks("x"), gave("x"), USER],
        "u:u aX: t:x|u",
        ["results"],
    ),
    (
        TemplateRules(one_call=True),
        [USER, asks("x", "y", "z"), gave("y"), gave("x"), USER],
        "u:u aY: t:y aX: t:x aZ: u:u",
        ["calls"],
    ),
    (TemplateRules(one_call=True), [USER, asks("x"), gave("x")], "u:u aX: t:x", []),
    (
        TemplateRules(one_call=True),
        [USER, asks("x", "x", "y", "x"), gave("x"), gave("x"), USER],
        "u:u aX: t:x aX: t:x aY: aX: u:u",
        ["calls"],
    ),
]


@pytest.mark.parametrize(("rules", "messages", "text", "names"), CASES)
def test_repairs(
    rules: TemplateRules, messages: list[dict[str, Any]], text: str, names: list[str]
) -> None:
    before = shown(messages)
    result, named = repaired(messages, rules)
    assert (shown(result), named) == (text, names)
    assert shown(messages) == before


def test_what_a_template_refuses_is_found_out() -> None:
    tokenizer = byte_tokenizer(())

    def rules(template: str) -> TemplateRules:
        return detect(tokenizer, template).rules

    loop = "{% for m in messages %}" + SHOW + "%s{% endfor %}"
    refuse = "{{ raise_exception('no') }}"
    assert rules(loop.replace("%s", "")) == TemplateRules()
    assert rules(MISTRAL) == TemplateRules(
        system_first=True, no_user_after_results=True, alternates=True
    )
    first = "{% if m.role == 'system' and not loop.first %}" + refuse + "{% endif %}"
    assert rules(loop.replace("%s", first)) == TemplateRules(system_first=True)
    none = "{% if m.role == 'system' %}" + refuse + "{% endif %}"
    assert rules(loop.replace("%s", none)) == TemplateRules(no_system=True)
    one = "{% if m.tool_calls and m.tool_calls | length > 1 %}" + refuse + "{% endif %}"
    assert rules(loop.replace("%s", one)) == TemplateRules(one_call=True)
    assert rules(refuse) == TemplateRules()  # it renders nothing at all


@cache
def mistral() -> tuple[Tokenizer, Detected]:
    tokenizer = byte_tokenizer(())
    return tokenizer, detect(tokenizer, MISTRAL)


TURNS = st.lists(
    st.sampled_from([[USER], [SAID], [SYSTEM], [asks("x", "y"), gave("x"), gave("y")]]),
    min_size=1,
    max_size=6,
)


@given(TURNS)
def test_a_strict_template_takes_any_conversation(turns: list[list[dict[str, Any]]]) -> None:
    """What it takes unrepaired is left alone; all of what is said is there."""
    messages = [USER, *(message for turn in turns for message in turn)]
    tokenizer, formats = mistral()
    prompt = render_prompt(tokenizer, messages, formats, chat_template=MISTRAL)
    text = tokenizer.decode(prompt.ids)
    for letter in "uasxy":
        wanted = sum(message["content"] == letter for message in messages)
        assert text.replace("user", "").replace("assistant", "").count(letter) >= wanted
    start = render_prompt(tokenizer, messages[:1], formats, chat_template=MISTRAL).ids
    assert prompt.ids[: len(start) - 1] == start[:-1]


def test_what_a_user_calls_is_not_read() -> None:
    tokenizer, formats = mistral()
    said = [{**USER, "tool_calls": 5}, {**USER, "tool_calls": True}]
    prompt = render_prompt(tokenizer, said, formats, chat_template=MISTRAL)
    assert tokenizer.decode(prompt.ids) == "user:u\nu;" and prompt.repairs == ("turns",)


TEXTS = st.one_of(st.text("ab", max_size=2), st.just([{"type": "image"}]))


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_neighbours_are_joined_at_once_as_one_by_one(contents: list[Any]) -> None:
    """What a message adds leaves those before as they were, for the prefix cache."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in contents]
    (whole,) = merged(messages, lambda first, said: True)
    assert whole == reduce(joined, messages)


def test_long_runs_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(*messages: Any) -> dict[str, Any]:
        calls.append(len(messages))
        return joined(*messages)

    monkeypatch.setattr(repair, "joined", counted)
    repaired([USER] * 99 + [SAID] * 9, TemplateRules(alternates=True))
    assert calls == [99, 9]

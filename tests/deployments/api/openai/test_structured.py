"""Forms of answers over HTTP: fields to guidance, and what is refused."""

import json
import time
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from rayfin.actors.errors import NoTokenLeft
from rayfin.actors.guidance import NO_END, Guidance
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.guidance.grammar import Grammar, make_grammar

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
USER = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = {"/v1/chat/completions": USER, "/v1/completions": {"prompt": "hi"}}

FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, '"object"'),
    ({"response_format": NAMED}, '"integer"'),
    ({"structured_outputs": {"json": SCHEMA}}, '"integer"'),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, '"integer"'),
    ({"structured_outputs": {"json_object": True}}, '"object"'),
    ({"structured_outputs": {"regex": "a{2,3}"}}, "a{2,3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, '"yes"'),
    ({"guided_json": SCHEMA}, '"integer"'),
    ({"guided_regex": "a{2,3}"}, "a{2,3}"),
    ({"guided_choice": ["yes", "no"]}, '"yes"'),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("form", "part"), FORMS, ids=str)
async def test_a_form_becomes_a_grammar(
    http: httpx.AsyncClient, engine: Any, path: str, form: dict[str, Any], part: str
) -> None:
    body = {**PATHS[path], **form, "n": 2, "temperature": 1, "min_tokens": 1}
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert len(engine.seen) == 2
    for request in engine.seen:
        guidance = request.part(Guidance)
        assert part in guidance.grammar and guidance.calls is None
        assert guidance.ends == (engine.eos,)
        assert guidance.ends_from == len(request.prompt) + 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("most", [0, 60])
async def test_the_engine_hears_which_grammars_are_quick(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch, path: str, most: int
) -> None:
    monkeypatch.setattr("rayfin.deployments.guidance.compile_check.GRAMMAR_QUICK_SECONDS", most)
    for _ in range(2):
        response = await http.post(path, json={**PATHS[path], "guided_json": SCHEMA})
        assert response.status_code == 200, response.text
    assert [request.part(Guidance).quick for request in engine.seen] == [most > 0] * 2


RULED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": NAMED}, "response_format.json_schema.schema"),
    ({"guided_regex": "a{2,3}"}, "guided_regex"),
    ({"structured_outputs": {"choice": ["yes"]}}, "structured_outputs.choice"),
    ({"allowed_token_ids": [20, 21], "bad_words": ["a"]}, "allowed_token_ids"),
    ({"bad_words": ["a"], "min_tokens": 3}, "bad_words"),
    ({"min_tokens": 3}, "min_tokens"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("rules", "param"), RULED, ids=str)
async def test_rules_that_leave_no_token_are_the_clients_mistake(
    http: httpx.AsyncClient, engine: Any, path: str, stream: bool, rules: Any, param: str
) -> None:
    """Amid the answer: the error names the field, and no SDK sends the request again."""
    engine.failure = (1, NoTokenLeft("no token is left"))
    response = await http.post(path, json={**PATHS[path], **rules, "stream": stream})
    if stream:
        *_, last, _ = response.text.strip().split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 400, response.text
        error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == ("no_token_left", param)


WORDS = [f"{number} of many words" for number in range(120)]
HARD = {"properties": {"a": {"enum": WORDS}, "b": {"pattern": "^a*$"}}, "nullable": True}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("schema", "makes"),
    [({"pattern": "^a*$"}, 0), ({"enum": WORDS[:60]}, 0), ({"enum": WORDS * 3}, 1), (HARD, 1)],
    ids=lambda value: str(value)[:40],
)
async def test_the_checker_makes_grammars_that_take_long(
    http: httpx.AsyncClient,
    engine: Any,
    service: OpenAIService,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    schema: dict[str, Any],
    makes: int,
) -> None:
    made = []
    form = service.checker.form

    async def spy(*form_and_path: Any) -> Grammar:
        made.append(await form(*form_and_path))
        return made[-1]

    monkeypatch.setattr(service.checker, "form", spy)
    outputs = StructuredOutputs(json=schema)
    response = await http.post(path, json={**PATHS[path], "structured_outputs": {"json": schema}})
    assert response.status_code == 200, response.text
    expected = make_grammar(outputs)
    assert engine.seen[0].part(Guidance).grammar == expected.text
    paths = ", ".join(expected.unenforced)
    assert response.headers.get("x-rayfin-unenforced", "") == paths
    assert made == [expected] * makes


@pytest.mark.parametrize("path", PATHS)
async def test_a_long_form_is_refused_by_its_path(http: httpx.AsyncClient, path: str) -> None:
    form = {"structured_outputs": {"json": {**HARD, "uniqueItems": True}}}
    error = (await http.post(path, json={**PATHS[path], **form})).json()["error"]
    assert error["code"] == "unsupported_schema"
    assert error["param"] == "structured_outputs.json.uniqueItems"


@pytest.mark.parametrize("path", PATHS)
async def test_plain_text_has_no_grammar(http: httpx.AsyncClient, engine: Any, path: str) -> None:
    body = {**PATHS[path], "response_format": {"type": "text"}, "guided_json": None}
    assert (await http.post(path, json=body)).status_code == 200
    assert engine.seen[0].part(Guidance) is None


async def test_ignore_eos_forbids_ends(http: httpx.AsyncClient, engine: Any) -> None:
    body = {**PATHS["/v1/completions"], "guided_regex": "a*", "ignore_eos": True}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    request = engine.seen[0]
    assert request.part(Guidance).ends_from == NO_END
    assert engine.eos in request.stopping.stop_token_ids


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    (
        {"structured_outputs": {"json": {}, "regex": "a"}},
        "structured_outputs",
        "invalid_value",
    ),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
    ({"response_format": NAMED, "guided_json": {}}, "guided_json", "invalid_value"),
    (
        {"structured_outputs": {"json_object": False}},
        "structured_outputs.json_object",
        "invalid_value",
    ),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "invalid_value"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
    (
        {"structured_outputs": {"structural_tag": {}}},
        "structured_outputs.structural_tag",
        "invalid_value",
    ),
    ({"structured_outputs": {"wizard": 1}}, "structured_outputs.wizard", "invalid_value"),
    ({"structured_outputs": []}, "structured_outputs", "invalid_type"),
    ({"structured_outputs": {"regex": {}}}, "structured_outputs.regex", "invalid_type"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "invalid_type"),
    ({"guided_regex": {}}, "guided_regex", "invalid_type"),
    ({"guided_choice": [1]}, "guided_choice[0]", "invalid_type"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "invalid_value"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "wizard"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": 5}}, "response_format.type", "invalid_type"),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "response_format.type",
        "invalid_value",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": s}}},
            "response_format.json_schema.schema",
            "invalid_type",
        )
        for s in ([], "{}", 5)
    ),
    *(
        ({"guided_json": schema}, f"guided_json{path}", "invalid_schema")
        for schema, path in [
            ({"properties": {"a": "x"}}, ".properties.a"),
            ({"required": "a"}, ".required"),
            ({"items": {"type": "strng"}}, ".items.type"),
            ({"items": {"$ref": "#/$defs/x"}}, ".items.$ref"),
            ({"items": {"pattern": "[.*"}}, ".items.pattern"),
        ]
    ),
    *(
        ({"guided_json": schema}, f"guided_json{path}", "unsatisfiable_schema")
        for schema, path in [
            (False, ""),
            ({"enum": []}, ""),
            ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
            ({"$ref": "#"}, ""),
        ]
    ),
    *(
        ({"guided_json": schema}, f"guided_json{path}", "unsupported_schema")
        for schema, path in [
            ({"properties": {"tags": {"uniqueItems": True}}}, ".properties.tags.uniqueItems"),
            ({"not": {}}, ".not"),
            ({"if": {"type": "string"}, "then": {"minLength": 1}}, ".if"),
        ]
    ),
    *(
        ({"structured_outputs": {kind: text}}, f"structured_outputs.{kind}", "invalid_schema")
        for kind, text in [
            ("regex", "[.*"),
            ("regex", "a{2,1}"),
            ("grammar", "start: missing"),
            ("grammar", 'other: "a"'),
            ("grammar", 'start: "\0"'),
            ("grammar", "root ::= missing"),
            ("json", "{"),
        ]
    ),
    *(
        (form, "", "schema_too_complex")
        for form in [
            {"structured_outputs": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}},
            {"guided_grammar": 'start: "' + "a" * 2**16 + '"'},
            {"guided_choice": [str(i) for i in range(1001)]},
            {"guided_json": {"properties": {f"p{i}": {} for i in range(5000)}}},
            {"guided_json": {"const": "x" * 10**6}},
            {"guided_regex": "(x{1000}){1000}"},
        ]
    ),
    ({"guided_regex": "a", "use_beam_search": True}, "use_beam_search", "invalid_value"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("form", "param", "code"), REFUSED, ids=lambda own: str(own)[:60])
async def test_refused(
    http: httpx.AsyncClient, engine: Any, path: str, form: dict[str, Any], param: str, code: str
) -> None:
    started = time.process_time()
    response = await http.post(path, json={**PATHS[path], **form})
    assert time.process_time() - started < 1
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code), error
    assert error["param"] is not None and error["param"].startswith(param)
    assert engine.seen == [] and "\n" not in error["message"]


@pytest.mark.parametrize("name", ["minLength", "minItems"])
async def test_counters_cost_nothing(http: httpx.AsyncClient, name: str) -> None:
    kind = "string" if name == "minLength" else "array"
    body = {"prompt": "hi", "guided_json": {"type": kind, name: 10**9}}
    assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_the_old_choice_of_a_backend_is_named(http: httpx.AsyncClient) -> None:
    body = {**PATHS["/v1/completions"], "guided_regex": "a", "guided_decoding_backend": "outlines"}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert "guided_decoding_backend" in response.headers["x-rayfin-ignored-fields"]


async def test_counted_by_kind(http: httpx.AsyncClient, service: OpenAIService) -> None:
    for form in ({"guided_regex": "a"}, {"guided_regex": "b"}, {"guided_json": SCHEMA}):
        assert (await http.post("/v1/completions", json={"prompt": "a", **form})).is_success
    counters = service.counts.report().counters
    assert counters["guided_requests", ("regex",)] == 2
    assert counters["guided_requests", ("json",)] == 1


async def test_the_openai_package(openai: AsyncOpenAI, engine: Any) -> None:
    format: Any = NAMED
    messages: Any = USER["messages"]
    stream = await openai.chat.completions.create(
        model="tiny", messages=messages, response_format=format, stream=True
    )
    assert [chunk async for chunk in stream]
    assert '"integer"' in engine.seen[0].part(Guidance).grammar

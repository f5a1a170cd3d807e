"""Structured output through real Serve, ingress, scheduler and runner, with the demo model."""

import json
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayfin import LLM, SamplingParams, StructuredOutputs
from rayfin.actors.timing import GRAMMAR_CHECK_SECONDS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
ANNA: list[Any] = [{"role": "user", "content": "Anna is 34 years old and lives in Rome."}]
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
STRICT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}
PATTERNS = {"type": "string", "allOf": [{"pattern": f".*w{i}.*"} for i in range(20)]}


def chat(http: httpx.Client, form: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": FRANCE, "temperature": 0, "max_tokens": 200, **form, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"])


def test_a_schema(app: Any, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=app.model, messages=ANNA, response_format=STRICT, temperature=0, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "stop"
    content = answer.choices[0].message.content
    assert content is not None
    assert json.loads(content) == {"name": "Anna", "age": 34, "city": "Rome"}


def test_a_stream_is_the_whole_answer(app: Any, client: openai.OpenAI) -> None:
    common: Any = {"model": app.model, "messages": FRANCE, "response_format": STRICT}
    common |= {"temperature": 1, "seed": 5, "max_tokens": 200}
    whole = client.chat.completions.create(**common).choices[0]
    chunks = list(client.chat.completions.create(**common, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.message.content and len(chunks) > 5
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(streamed), PERSON)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}, "[a-f]{3}-[0-9]{2}"),
        ({"guided_regex": "(yes|no)!"}, "(yes|no)!"),
        ({"structured_outputs": {"choice": ["Lima", "Paris"]}}, "Lima|Paris"),
        ({"guided_choice": ["x y", "x z"]}, "x [yz]"),
        ({"structured_outputs": {"json": {"enum": [7, "b"]}}}, '7|"b"'),
        (
            {"structured_outputs": {"grammar": 'start: "a" B "c"\nB: /[0-9]{1,3}x/'}},
            "a[0-9]{1,3}xc",
        ),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, "b*a"),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_patterns(
    http: httpx.Client, form: dict[str, Any], pattern: str, temperature: float
) -> None:
    text = text_of(chat(http, form, temperature=temperature, seed=3))
    assert re.fullmatch(pattern, text), text


def test_a_json_object(http: httpx.Client) -> None:
    form = {"response_format": {"type": "json_object"}, "messages": ANNA}
    assert isinstance(json.loads(text_of(chat(http, form))), dict)


def test_completions_have_forms_too(http: httpx.Client) -> None:
    body = {"prompt": "The capital of France is", "guided_choice": ["Rome", "Paris"]}
    answer = http.post("/v1/completions", json={**body, "temperature": 0}).raise_for_status()
    assert answer.json()["choices"][0]["text"] in ("Rome", "Paris")


def test_choices_differ_and_all_have_the_form(http: httpx.Client) -> None:
    answer = chat(http, {"response_format": STRICT}, n=4, temperature=1.2, seed=1)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) > 1
    for choice, text in zip(answer["choices"], texts, strict=True):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), PERSON)


def test_a_stop_string_cuts(http: httpx.Client) -> None:
    answer = chat(http, {"guided_regex": "aaaa-bbbb-cccc"}, stop="-cc")
    assert text_of(answer) == "aaaa-bbbb"


def test_max_tokens_leaves_a_beginning(http: httpx.Client) -> None:
    answer = chat(http, {"guided_regex": "a{400}"}, max_tokens=5)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert re.fullmatch("a+", choice["message"]["content"])


def test_log_probabilities(http: httpx.Client) -> None:
    answer = chat(http, {"guided_choice": ["Paris", "Rome"]}, logprobs=True, top_logprobs=2)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(text_of(answer))
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)


def test_ends_wait_for_min_tokens(http: httpx.Client) -> None:
    answer = chat(http, {"guided_regex": "(ab)*"}, min_tokens=12, max_tokens=40)
    assert answer["usage"]["completion_tokens"] >= 12
    answer = chat(http, {"guided_regex": "(ab)*"}, ignore_eos=True, max_tokens=30)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 30
    # Where nothing else is left the end is taken all the same.
    answer = chat(http, {"guided_choice": ["ab"]}, ignore_eos=True, min_tokens=20)
    assert text_of(answer) == "ab"


def test_stop_token_ids_with_a_form(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "5", "add_special_tokens": False}).json()
    (five,) = tokens["tokens"]
    answer = chat(http, {"guided_regex": "[0-9]{50}"}, stop_token_ids=[five], temperature=1, seed=2)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", five)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"not": {}}}, "unsupported_schema"),
    ({"guided_json": {"enum": []}}, "unsatisfiable_schema"),
    ({"guided_regex": "(a"}, "invalid_schema"),
    ({"guided_json": {"const": "x" * 70_000}}, "schema_too_complex"),
    ({"guided_json": PATTERNS}, "schema_too_complex"),
    ({"guided_regex": "(x{1000}){1000}"}, "schema_too_complex"),
]


@pytest.fixture
def stream_beside(app: Any) -> Iterator[list[float]]:
    """When chunks of streams came, one of which runs beside a test at any time."""
    times: list[float] = []
    done = threading.Event()

    def run(http: httpx.Client) -> None:
        body = {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 1500}
        with http.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                times.append(time.monotonic())
                if done.is_set():
                    return

    def run_again() -> None:
        with app.client() as http:
            while not done.is_set():
                run(http)

    thread = threading.Thread(target=run_again)
    thread.start()
    yield times
    done.set()
    thread.join()


def test_hostile_forms_beside_a_stream(http: httpx.Client, stream_beside: list[float]) -> None:
    """None is let in, and none stops the stream for as long as it is looked at."""
    while len(stream_beside) < 5:
        time.sleep(0.01)
    for form, code in REFUSED:
        begun = time.monotonic()
        response = http.post("/v1/chat/completions", json={"messages": FRANCE, **form})
        ended = time.monotonic()
        refusal = response.status_code, response.json()["error"]["code"]
        # Where the machine is busy there may be no time to find out what is wrong.
        assert refusal in [(400, code), (429, "queue_full")], response.text
        if ended - begun > GRAMMAR_CHECK_SECONDS:
            moments = [begun, *(time for time in stream_beside if begun < time < ended), ended]
            longest = max(after - before for before, after in pairwise(moments))
            assert longest < 0.75 * (ended - begun), "the event loop stood still"
    assert text_of(chat(http, {"guided_choice": ["fine"]})) == "fine"


def series(http: httpx.Client) -> dict[str, float]:
    """The counters of guided requests, by their label."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").raise_for_status().text):
        if family.name in ("rayfin_guided_requests", "rayfin_grammar_verdicts"):
            for sample in family.samples:
                found[sample.labels.get("kind") or sample.labels["verdict"]] = sample.value
    return found


def test_metrics(app: Any, http: httpx.Client) -> None:
    app.samples()  # of now
    before = series(http)
    chat(http, {"guided_regex": "abc"})
    app.samples()
    after = series(http)
    assert after["regex"] == before["regex"] + 1
    assert after["ok"] == before["ok"] + 1


def test_offline_answers_the_same(http: httpx.Client, solo: LLM) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputs(json=PERSON), temperature=0, max_tokens=200
    )
    (offline,) = solo.generate("Anna", params, use_tqdm=False)
    body = {"prompt": "Anna", "guided_json": PERSON, "temperature": 0, "max_tokens": 200}
    online = http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
    assert online["text"] == offline.outputs[0].text
    jsonschema.validate(json.loads(online["text"]), PERSON)

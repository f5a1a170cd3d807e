"""Fields of vLLM's bodies, its limits, and what a server's flags change in answers."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rayfin.actors.messages import Repetition
from rayfin.deployments.generation.limits import MAX_CHOICES
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import REASONING_FORMATS
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def refused(http: httpx.AsyncClient, path: str, body: Any) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_any_role_of_the_template(
    http: httpx.AsyncClient, service: OpenAIService, engine: Any, tokenizer: Tokenizer
) -> None:
    body = {"messages": [{"role": "wizard", "content": "hello"}], "max_tokens": 3}
    assert (await http.post(CHAT, json=body)).status_code == 200
    assert "wizard\nhello" in tokenizer.decode(engine.seen[0].prompt.tolist())
    service.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('Who?') }}{% endif %}x"
    )
    assert "Who?" in (await refused(http, CHAT, body))["message"]
    for role in ("", "<|im_end|>", "a b", 5):
        body["messages"][0]["role"] = role  # type: ignore[index]
        assert (await refused(http, CHAT, body))["param"] == "messages[0].role"


@pytest.mark.parametrize(
    ("biases", "named"),
    [
        ({"hello": 1, "5": 1, "x": 2}, ("'hello'", "'x'")),
        ({"99999": 1, "88888": 1}, ("99999", "88888")),
        ({"-1": 1, "-2": 1}, ("-1", "-2")),
        ({"5": 101, "6": -102}, ("101 for token 5", "-102 for token 6")),
    ],
)
async def test_all_bad_biases_are_named(
    http: httpx.AsyncClient, biases: dict[str, float], named: tuple[str, ...]
) -> None:
    error = await refused(http, TEXT, {"prompt": "hello", "logit_bias": biases})
    assert error["param"] == "logit_bias"
    assert all(name in error["message"] for name in named)


async def test_limits_of_a_request(
    http: httpx.AsyncClient, service: OpenAIService, engine: Any
) -> None:
    body = {"prompt": [[5]] * 1024, "max_tokens": 1, "stop": [str(i) for i in range(64)]}
    reply = (await http.post(TEXT, json=body)).json()
    assert len(reply["choices"]) == 1024
    reply = (await http.post(TEXT, json={"prompt": [5], "n": 1200, "max_tokens": 1, **USAGE})).text
    assert reply.count('"finish_reason":"length"') == 1200
    service.replies = replace(service.replies, max_prompts=2)
    for fields, param in (
        ({"prompt": ["a"] * 3}, "prompt"),
        ({"prompt": ["a"] * 2, "n": MAX_CHOICES // 2 + 1}, "n"),
        ({"prompt": "a", "best_of": MAX_CHOICES + 1}, "best_of"),
        ({"prompt": "a", "stop": [str(i) for i in range(65)]}, "stop"),
    ):
        error = await refused(http, TEXT, fields)
        assert error["param"] == param and "at most" in error["message"]


async def test_templates_of_requests_must_be_trusted(
    http: httpx.AsyncClient, service: OpenAIService, engine: Any, tokenizer: Tokenizer
) -> None:
    body = {**HELLO, "chat_template": "[{{ messages[0].content }}]"}
    tokenize = {name: value for name, value in body.items() if name != "max_tokens"}
    for path, own in ((CHAT, body), ("/tokenize", tokenize)):
        error = await refused(http, path, own)
        assert error["param"] == "chat_template"
        assert "--trust-request-chat-template" in error["message"]
    service.replies = replace(service.replies, trust_chat_templates=True)
    assert (await http.post(CHAT, json=body)).status_code == 200
    ids = engine.seen[0].prompt.tolist()
    assert tokenizer.decode(ids) == "[hello]"
    assert (await http.post("/tokenize", json=tokenize)).json()["tokens"] == ids
    assert (await refused(http, CHAT, {**HELLO, "chat_template": "{% if"}))["param"] == "messages"


@pytest.mark.parametrize("streamed", [False, True])
async def test_named_tokens_have_log_probabilities(
    http: httpx.AsyncClient, engine: Any, tokenizer: Tokenizer, streamed: bool
) -> None:
    """Behind the token's own, in their order; how many of the likeliest does not matter."""
    named = {"logprob_token_ids": [5, 6, 7], "stream": streamed, "seed": 7, "temperature": 1}
    for top in ({}, {"top_logprobs": 1}):
        body = {**HELLO, **named, "logprobs": True, **top}
        response = await http.post(CHAT, json=body)
        replies = chunks(response.text) if streamed else [response.json()]
        sent = [reply["choices"][0]["logprobs"] for reply in replies]
        entries = [entry for own in sent if own for entry in own["content"]]
        assert len(entries) == 3
        for token, entry in zip(engine.reply, entries, strict=False):
            texts = [tokenizer.token_text(i) for i in (token, 5, 6, 7)]
            assert [own["token"] for own in entry["top_logprobs"]] == texts
            scores = [own["logprob"] for own in entry["top_logprobs"]]
            assert scores == [-3.0, -0.25, -0.5, -9999.0]
    for logprobs in (0, 2):
        body = {"prompt": "hello", "max_tokens": 3, **named, "logprobs": logprobs}
        response = await http.post(TEXT, json=body)
        replies = chunks(response.text) if streamed else [response.json()]
        tops = [t for r in replies for t in r["choices"][0]["logprobs"]["top_logprobs"]]
        assert [len(top) for top in tops] == [4] * 3
        assert all(list(top)[1:] == texts[1:] for top in tops)
    sampling = engine.seen[-1].sampling
    assert (sampling.logprobs, sampling.logprob_ids) == (0, (5, 6, 7))


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": None},
        {"logprob_token_ids": [99999, 88888]},
        {"logprob_token_ids": [-1]},
        {"logprob_token_ids": [5] * 129},
        {"use_beam_search": True, "n": 2, "logprobs": None},
        {"echo": True, "max_tokens": 0},
    ],
)
async def test_tokens_that_cannot_be_named(http: httpx.AsyncClient, fields: Any) -> None:
    body = {"prompt": "hello", "logprobs": 1, "logprob_token_ids": [5], **fields}
    error = await refused(http, TEXT, body)
    assert error["param"] == "logprob_token_ids"
    assert all(str(i) in error["message"] for i in fields.get("logprob_token_ids", ())[:2] if i > 9)


async def test_a_prompt_that_another_server_rendered(
    http: httpx.AsyncClient, service: OpenAIService, engine: Any
) -> None:
    """Stands for the messages, verbatim; a stream says it once."""
    params = {"prompt_token_ids": [5, 6, 7], "do_remote_prefill": True, "remote_host": "x"}
    body = {**HELLO, "kv_transfer_params": params, "return_token_ids": True}
    reply = (await http.post(CHAT, json=body)).json()
    assert engine.seen[-1].prompt.tolist() == [5, 6, 7] == reply["prompt_token_ids"]
    assert reply["kv_transfer_params"] is None and reply["usage"]["prompt_tokens"] == 3
    got = chunks((await http.post(CHAT, json={**body, "n": 2, "stream": True})).text)
    assert [chunk.get("prompt_token_ids") for chunk in got] == [[5, 6, 7]] + [None] * (len(got) - 1)
    for same in ({"echo": True}, {"kv_transfer_params": {"do_remote_decode": True}}):
        assert (await http.post(CHAT, json={**body, **same})).status_code == 200
        assert len(engine.seen[-1].prompt) > 3
    path = "kv_transfer_params.prompt_token_ids"
    for bad in ([], [True], [-1], "x", [99999], [5] * 500):
        error = await refused(
            http, CHAT, {**HELLO, "kv_transfer_params": {"prompt_token_ids": bad}}
        )
        assert error["param"] == path
    assert (await refused(http, CHAT, {**body, "messages": [{"role": "user"}]}))["param"] == (
        "messages[0].content"
    )
    body = {"prompt": "hello", "kv_transfer_params": params}
    assert (await http.post(TEXT, json=body)).status_code == 200


async def test_a_given_prompt_may_open_a_thought(
    http: httpx.AsyncClient, service: OpenAIService, engine: Any, tokenizer: Tokenizer
) -> None:
    service.formats = Detected(None, REASONING_FORMATS["think"])
    service.chat_template = (
        "{{ messages[0].content }}{% if add_generation_prompt %}:<think>{% endif %}"
    )
    engine.reply = tokenizer.encode("hm</think>yes", False)
    for text, thought in (("other:<think>", "hm"), ("<think>other:", None)):
        params = {"prompt_token_ids": tokenizer.encode(text, False)}
        body = {**HELLO, "max_tokens": 60, "kv_transfer_params": params}
        message = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]
        assert message["reasoning"] == thought


@pytest.mark.parametrize("prompt", [None, "", []])
async def test_an_empty_prompt(http: httpx.AsyncClient, prompt: Any) -> None:
    error = await refused(http, TEXT, {"prompt": prompt})
    assert error["message"] == "Either prompt or prompt_embeds must be provided and non-empty."
    assert error["param"] == "prompt"


async def test_times_of_requests(
    http: httpx.AsyncClient, service: OpenAIService, engine: Any
) -> None:
    """In the answer, or in a stream's usage chunk alone; of requests of one choice."""
    service.replies = replace(service.replies, metrics=True)
    engine.waits = (0.25, 0.75)
    body = {"prompt": "hello", "max_tokens": 5}
    metrics = (await http.post(TEXT, json=body)).json()["metrics"]
    assert metrics["queue_time_ms"] == 250 and metrics["time_to_first_token_ms"] == 500
    decode = metrics["generation_time_ms"]
    assert decode >= 0 and metrics["mean_itl_ms"] == pytest.approx(decode / 4)
    assert metrics["tokens_per_second"] == pytest.approx(5 / (0.5 + decode / 1e3))
    assert engine.seen[-1].timed
    *others, last = chunks((await http.post(CHAT, json={**HELLO, **USAGE})).text)
    assert last["metrics"]["queue_time_ms"] == 250 and last["choices"] == []
    assert not any("metrics" in chunk for chunk in others)
    one = {**body, "max_tokens": 1, **USAGE}
    assert "mean_itl_ms" not in chunks((await http.post(TEXT, json=one)).text)[-1]["metrics"]
    for several in ({"n": 2}, {"prompt": ["a", "b"]}):
        assert (await http.post(TEXT, json={**body, **several})).json()["metrics"] is None
    assert not engine.seen[-1].timed


async def test_what_flags_add_to_answers(http: httpx.AsyncClient, service: OpenAIService) -> None:
    service.replies = replace(
        service.replies, force_usage=True, tokens_as_ids=True, prompt_tokens_details=False
    )
    body = {"prompt": "hello", "max_tokens": 3, "logprobs": 0}
    got = chunks((await http.post(TEXT, json={**body, "stream": True})).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in got] == [1, 2, 3, 3]
    assert got[-1]["choices"] == [] and "prompt_tokens_details" not in got[-1]["usage"]
    assert got[0]["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    reply = (await http.post(TEXT, json={**body, "return_tokens_as_token_ids": False})).json()
    assert not reply["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    assert reply["usage"]["prompt_tokens_details"] is None


async def test_repetition_detection(http: httpx.AsyncClient, engine: Any) -> None:
    rule = {"max_pattern_size": 4, "min_count": 3}
    for path, body in ((TEXT, {"prompt": "hello"}), (CHAT, HELLO)):
        body = {**body, "max_tokens": 3, "ignore_eos": True}
        assert (await http.post(path, json={**body, "repetition_detection": rule})).is_success
        assert engine.seen[-1].stopping.repetition == Repetition(4, 1, 3)
        wrong = {**body, "repetition_detection": {**rule, "min_count": 1}}
        assert (await refused(http, path, wrong))["param"] == "repetition_detection.min_count"
        beams = {**body, "repetition_detection": rule, "use_beam_search": True}
        assert (await refused(http, path, beams))["param"] == "repetition_detection"


async def test_an_answer_that_repeats_itself(http: httpx.AsyncClient, engine: Any) -> None:
    """Both of its reasons are vLLM's."""
    engine.ending = "repetition", "repetition_detected"
    for path, body in ((TEXT, {"prompt": "hello"}), (CHAT, HELLO)):
        choice = (await http.post(path, json=body)).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == engine.ending
        last = chunks((await http.post(path, json={**body, "stream": True})).text)[-1]
        assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == (
            engine.ending
        )


@pytest.mark.parametrize(
    ("seed", "kind"), [(-(2**63) - 1, "greater_than_equal"), (2**63, "less_than_equal")]
)
async def test_a_seed_out_of_range_names_pydantics_kind(
    http: httpx.AsyncClient, seed: int, kind: str
) -> None:
    """In the message, where vLLM's own tests look for it."""
    for path, body in ((TEXT, {"prompt": "hello"}), (CHAT, HELLO)):
        error = await refused(http, path, {**body, "seed": seed})
        assert (error["param"], kind in error["message"]) == ("seed", True)

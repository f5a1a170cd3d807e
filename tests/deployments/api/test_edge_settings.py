"""Settings of the edge, by which an operator fits the API into a place: paths, layers, logs."""

import logging
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.api.app import build_api
from rayfin.deployments.app import edge_settings
from rayfin.deployments.edge.middleware import check_middleware
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.telemetry.request_log import RequestLog

pytestmark = pytest.mark.anyio
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"


def client(service: OpenAIService, **settings: Any) -> httpx.AsyncClient:
    service.edge = edge_settings(ServerArgs(**settings))
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://rayfin")


@pytest.mark.parametrize("removed", [True, False])
async def test_a_path_in_front(service: OpenAIService, removed: bool) -> None:
    """A proxy that offers the API at /llm may remove that, or leave it."""
    prefix = "" if removed else "/llm"
    async with client(service, root_path="/llm", api_key="sk-test", enable_docs=True) as http:
        assert (await http.get(f"{prefix}/health")).status_code == 200
        assert (await http.get(f"{prefix}/v1/models")).status_code == 401
        assert (await http.get(f"{prefix}/llm/v1/models")).status_code in (401, 404)
        headers = {"Authorization": "Bearer sk-test"}
        assert (await http.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
        reply = await http.post(f"{prefix}{CHAT}", json=HELLO, headers=headers)
        assert reply.status_code == 200
        document = (await http.get(f"{prefix}/openapi.json", headers=headers)).json()
        assert document["servers"] == [{"url": "/llm"}]


async def test_a_path_needs_its_form() -> None:
    for path in ("llm", "/llm/"):
        with pytest.raises(InvalidConfig, match="root_path must begin with /"):
            ServerArgs(root_path=path)


class Stamp:
    """Middleware as a class."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self._app(scope, receive, stamped)


async def only_with_a_ticket(request: Request, call_next: Any) -> Response:
    """Middleware as a function."""
    if "x-ticket" not in request.headers:
        return Response("no ticket", 418)
    answer: Response = await call_next(request)
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_middleware_of_the_operator(service: OpenAIService, stream: bool) -> None:
    names = [f"{__name__}.{own.__name__}" for own in (Stamp, only_with_a_ticket)]
    check_middleware(names)
    async with client(service, middleware=names) as http:
        refused = await http.post(CHAT, json=HELLO)
        assert refused.status_code == 418 and "x-stamp" not in refused.headers  # it is outermost
        reply = await http.post(CHAT, json=HELLO | {"stream": stream}, headers={"X-Ticket": "1"})
        assert reply.status_code == 200 and reply.headers["x-stamp"] == "class"
        assert not stream or reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["no.such.module", "os.nothing", "os.sep", "os.getcwd", "os"])
async def test_middleware_that_is_none(path: str) -> None:
    with pytest.raises(InvalidConfig, match=f"middleware '{path}' "):
        check_middleware([path])


async def test_requests_in_the_log(
    service: OpenAIService, caplog: pytest.LogCaptureFixture
) -> None:
    service.request_log = RequestLog(4, service.tokenizer.decode)
    async with client(service) as http:
        with caplog.at_level(logging.INFO, "rayfin.requests"):
            await http.post(CHAT, json=HELLO | {"temperature": 0.25})
        (line,) = caplog.messages
        assert line.startswith("Received request chatcmpl-") and "temperature=0.25" in line
        assert "hello" not in line  # prompts are for level debug
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "rayfin.requests"):
            await http.post("/v1/completions", json={"prompt": "hello world", "max_tokens": 1})
    first, second = caplog.messages
    assert "prompt: 'hell', prompt_token_ids: [" in second and "world" not in second


async def test_answers_in_the_log(service: OpenAIService, caplog: pytest.LogCaptureFixture) -> None:
    """Whole, however they are sent; and not the prompt, even where the answer echoes it."""
    service.request_log = RequestLog(6, service.tokenizer.decode, outputs=True)
    asked = {"prompt": "hello world", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with client(service) as http:
        reply = await http.post("/v1/completions", json=asked | {"return_token_ids": True})
        (choice,) = reply.json()["choices"]
        for more in ({}, {"stream": True}, {"echo": True}):
            caplog.clear()
            with caplog.at_level(logging.DEBUG, "rayfin.requests"):
                await http.post("/v1/completions", json=asked | more)
            line, details = (own for own in caplog.messages if own.startswith("Answer"))
            assert line.startswith("Answered request cmpl-")
            assert line.endswith(f": output: {choice['text'][:6]!r}, finish_reason: length")
            assert details.endswith(f"output_token_ids: {choice['token_ids'][:6]}")


async def test_thoughts_and_calls_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(None, lambda ids, skip: "", outputs=True)
    with caplog.at_level(logging.INFO, "rayfin.requests"):
        log.answered("chatcmpl-1", "", "so it is", ['f({"a": 1})'], [1, 2], "tool_calls")
        RequestLog(None, lambda ids, skip: "").answered("chatcmpl-2", "a", "", [], [1], "stop")
    (line,) = caplog.messages
    assert line == (
        "Answered request chatcmpl-1: reasoning: 'so it is', tool_calls: 'f({\"a\": 1})', "
        "output: '', finish_reason: tool_calls"
    )


LONG = {"stream": True, "stream_options": {"x" * 100_000: True}}


async def test_stack_traces_of_refusals(
    service: OpenAIService, caplog: pytest.LogCaptureFixture
) -> None:
    """Of bodies, of a model that there is not, of an address; with --log-error-stack only."""
    bodies = [HELLO | {"temperature": "hot"}, HELLO | {"model": "none"}, HELLO | LONG]
    for wanted in (False, True):
        caplog.clear()
        async with client(service, log_error_stack=wanted) as http:
            with caplog.at_level(logging.WARNING, "rayfin.http"):
                statuses = [(await http.post(CHAT, json=body)).status_code for body in bodies]
                statuses.append((await http.get("/nowhere")).status_code)
        assert statuses == [400, 404, 400, 404]
        found = [record for record in caplog.records if "line " in record.getMessage()]
        assert all(len(record.getMessage()) < 20_000 for record in found)
        assert len(found) == (len(statuses) if wanted else 0)
        assert [record.args[2] for record in found if record.args] == statuses[: len(found)]


async def test_the_tokenizers_settings(service: OpenAIService) -> None:
    async with client(service) as http:
        assert (await http.get("/tokenizer_info")).status_code == 404
    async with client(service, enable_tokenizer_info_endpoint=True) as http:
        info = (await http.get("/tokenizer_info")).json()
        inner = service.tokenizer.inner
        assert info["tokenizer_class"] == type(inner).__name__
        assert info["chat_template"] == inner.chat_template
        assert info["eos_token"] == inner.eos_token
        assert not {"vocab_file", "name_or_path"} & set(info)
        assert (await http.get("/tokenizer_info?model=none")).status_code == 404


async def test_settings_are_for_operators(service: OpenAIService) -> None:
    server = ServerArgs(admin_api_key="ak-test", api_key="sk-test", max_prompts=7)
    service.settings = ModelArgs(server, EngineArgs(page_size=32)).shown()
    async with client(service, admin_api_key="ak-test") as http:
        assert (await http.get("/server_info")).status_code == 401
        headers = {"Authorization": "Bearer ak-test"}
        answer = await http.get("/server_info?config_format=json", headers=headers)
        settings = answer.json()["models"][0]["settings"]
        assert (settings["max_prompts"], settings["page_size"]) == (7, 32)
        assert "sk-test" not in answer.text and "ak-test" not in answer.text


async def test_recordings_have_a_limit_of_their_own(service: OpenAIService) -> None:
    """A model of text refuses them by its name, and does not say that they are too large."""
    headers = {"content-type": "multipart/form-data; boundary=x"}
    async with client(service, max_body_bytes=100, max_audio_upload_bytes=1000) as http:
        for path in ("transcriptions", "translations"):
            for size, status in ((500, 404), (600_000, 413)):
                reply = await http.post(f"/v1/audio/{path}", content=bytes(size), headers=headers)
                assert reply.status_code == status, reply.text
        assert (await http.post(CHAT, content=bytes(500))).status_code == 413

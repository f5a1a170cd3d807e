"""Bad inputs, row by row of the project's list, to a real engine that answers others meanwhile.

Rows that need a socket are in tests/e2e/test_edge.py, keys and layers in tests/deployments/edge.
"""

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import httpx
import pytest

from rayfin.actors.messages import EngineInfo, EngineRequest, TokenDelta
from rayfin.deployments.api.app import build_api
from rayfin.deployments.client.deltas import split_deltas
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
logger = logging.getLogger(__name__)

HANG = 30.0  # seconds; nothing here takes one
SLOW = 1.0  # seconds from which a row is worth a line
VICTIM = {"prompt": "hello world", "seed": 7, "max_tokens": 40, "ignore_eos": True}
C, M = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
JSON = {"Content-Type": "application/json"}
UTF16 = {"Content-Type": "application/json;charset=utf-16"}
PART_TYPE = "messages[0].content[0].type"


class LiveEngine:
    """The engine itself on runners without a model, stepped by this event loop."""

    def __init__(self, harness: Any, vocab_size: int) -> None:
        self.engine = harness.engine
        self.executor = harness.executor
        config = self.engine.config
        self.limits = EngineInfo(
            "live", config.max_model_len, vocab_size, config.num_pages, config.page_size
        )
        self.paused = asyncio.Event()  # set: no further step
        self._keys = itertools.count()
        self._news: dict[int, asyncio.Queue[TokenDelta | Exception]] = {}
        self._task: asyncio.Task[None] | None = None

    async def info(self) -> EngineInfo:
        return self.limits

    async def check_health(self) -> None: ...

    async def metrics(self) -> bytes:
        return b""

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        key = next(self._keys)
        news = self._news[key] = asyncio.Queue()
        self.engine.add(replace(request, client="edge", key=key, parent_key=None))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._loop())
        try:
            while True:
                delta = await news.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            del self._news[key]
            self.engine.abort("edge", key)

    async def _loop(self) -> None:
        while self.engine.has_work:
            if not self.paused.is_set():
                for message in self.engine.step().values():
                    for key, delta in split_deltas(message, dict.fromkeys(self._news, "")):
                        self._news[key].put_nowait(delta)
                    for ended in message.ended:
                        if ended.error is not None and ended.key in self._news:
                            self._news[ended.key].put_nowait(ended.error)
            await asyncio.sleep(0)

    async def idle(self) -> None:
        """Until nothing is left, and no page is held."""
        while self.engine.has_work:
            await asyncio.sleep(0)
        assert self.engine.stats().pages_held == 0
        self.engine.check_integrity()


@pytest.fixture
def live(simulate: ModuleType, tokenizer: Tokenizer) -> LiveEngine:
    harness = simulate.make_harness(
        max_model_len=128, num_pages=256, vocab_size=tokenizer.vocab_size
    )
    return LiveEngine(harness, tokenizer.vocab_size)


@pytest.fixture
def app(live: LiveEngine, tokenizer: Tokenizer) -> Any:
    return build_api(OpenAIService(live, tokenizer, ["tiny"], live.limits.max_model_len))


@pytest.fixture
async def client(app: Any, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        yield client


def completion(row: str, status: int, code: str | None, param: str | None, **body: Any) -> Any:
    return row, C, {"prompt": "a", **body}, status, code, param


def chat(row: str, status: int, code: str | None, param: str | None, **body: Any) -> Any:
    return row, M, {"messages": [USER], **body}, status, code, param


def raw(row: str, status: int, code: str, body: bytes, **headers: str) -> Any:
    return row, C, (body, {**JSON, **headers}), status, code, None


MOST_BYTES = 128 * 1024  # of an answer: the model's context times what is sent of a token

# (rows of the list, path, JSON body or (bytes, headers), status, code, param); None: whatever it is
ROWS: list[Any] = [
    # A. Transport
    raw("10", 415, "unsupported_media_type", b"{}", **{"Content-Type": "text/plain"}),
    raw("10", 415, "unsupported_media_type", b"a=b", **{"Content-Type": "multipart/form-data"}),
    raw("11", 415, "unsupported_media_type", b"{}", **UTF16),
    raw("12", 400, "invalid_json", b""),
    raw("13", 400, "invalid_json", b'{"prompt": "a",}'),
    *(raw("14", 400, TYPE, body) for body in (b"[]", b'"x"', b"42", b"null", b"true")),
    raw("15", 400, "invalid_json", b'{"prompt":"a"}{"n":2}'),
    raw("16", 400, "duplicate_key", b'{"n":1,"n":99}'),
    raw("17", 400, "invalid_json", b'{"prompt":"\xff"}'),
    raw("18", 400, "invalid_json", '{"prompt":"a"}'.encode("utf-16")),
    raw("18", 400, "invalid_json", b"\xef\xbb\xbf{}"),
    *(
        raw("19-20", 400, "invalid_number", b'{"temperature":%s}' % n)
        for n in (b"NaN", b"Infinity")
    ),
    *(raw("19-20", 400, "invalid_number", b'{"x":%s}' % n) for n in (b"-Infinity", b"1e999")),
    raw("21", 400, "invalid_number", b'{"n":' + b"1" * 5000 + b"}"),
    *(raw("22", 400, "invalid_json", b'{"x":' + b"[" * n + b"]" * n + b"}") for n in (64, 5000)),
    raw("22", 400, "invalid_json", b'{"x":' + b"[" * 200_000),
    raw("23", 400, "body_too_complex", b'{"x":[' + b"1," * 10**6 + b"1]}"),
    raw("24", 413, "request_too_large", b" " * (4 * 2**20 + 1)),
    raw("26", 415, "unsupported_media_type", b"{}", **{"Content-Encoding": "gzip"}),
    raw("28", 431, "headers_too_large", b"{}", X="y" * 65_536),
    raw("35-36", 400, "invalid_request", b"{}", **{"X-Request-Id": "x" * 129}),
    # B. Model (39 is 200: the one that is served)
    *(
        completion("40-41", 404, "model_not_found", "model", model=m)
        for m in ("gpt-7", "", "../../etc/passwd", "http://x", "a\0b", "x" * 10**6)
    ),
    completion("40", 400, TYPE, "model", model=5),
    *(
        completion("42-43", 404, "model_not_found", "model", model=m)
        for m in ("other-tenants-model", "tiny:adapter", "tiny/adapter")
    ),
    # C. Prompts
    (("44", C, {}, 400, MISSING, "prompt")),
    completion("44", 400, MISSING, "prompt", prompt=None),
    completion("45", 400, "empty_prompt", "prompt", prompt=""),
    completion("46", 400, "empty_array", "prompt", prompt=[]),
    completion("46", 400, "empty_array", "prompt[0]", prompt=[[]]),
    completion("46", 400, "empty_prompt", "prompt[0]", prompt=[""]),
    *(
        completion("47", 400, "array_above_max_length", "prompt", prompt=["a"] * n)
        for n in (1025, 10**5)
    ),
    completion("48", 400, TYPE, "prompt[1]", prompt=[1, "a"]),
    completion("49", 400, TYPE, "prompt[0]", prompt=[True, False]),
    completion("50", 400, TYPE, "prompt[0]", prompt=[1.0]),
    *(
        completion("51-53", 400, "invalid_token_id", "prompt", prompt=[t])
        for t in (-1, 999_999, 2**63, 10**20)
    ),
    completion("54", 400, TYPE, "prompt", prompt={"a": 1}),
    completion("54", 400, TYPE, "prompt[0][0]", prompt=[[["a"]]]),
    raw("55", 400, "invalid_unicode", rb'{"prompt":"\ud800"}'),
    completion("56", 200, None, None, prompt="\0\x01\u202eabc"),
    completion("57", 400, "context_length_exceeded", "prompt", prompt="a" * 10**6),
    completion("57", 400, "context_length_exceeded", "prompt", prompt=" " * 10**6),
    completion("57", 400, "context_length_exceeded", "prompt", prompt="\u200d" * 600_000),
    completion("58", 400, "context_length_exceeded", "prompt", prompt=[5] * 128),
    completion("60", 200, None, None, prompt=[5] * 127, max_tokens=1),
    ("62", M, {}, 400, MISSING, "messages"),
    chat("63", 400, "empty_array", "messages", messages=[]),
    *(chat("64", 400, None, "messages", messages=m) for m in (None, {}, "hi")),
    chat("65", 400, MISSING, "messages[0].role", messages=[{"content": "x"}]),
    chat("66", 400, VALUE, "messages[0].role", messages=[{"role": "a wizard", "content": "x"}]),
    chat(
        "67", 400, MISSING, "messages[0].tool_call_id", messages=[{"role": "tool", "content": "x"}]
    ),
    chat("68", 400, MISSING, "messages[0].content", messages=[{"role": "user"}]),
    chat(
        "69", 400, "empty_array", "messages[0].content", messages=[{"role": "user", "content": []}]
    ),
    chat("70", 400, MISSING, PART_TYPE, messages=[{"role": "user", "content": [{"text": "x"}]}]),
    *(
        chat(
            "71-73",
            400,
            "unsupported_content",
            "messages[0].content[0].type",
            messages=[{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}],
        )
        for kind in ("image_url", "input_audio")
        for url in ("http://169.254.169.254/", "file:///etc/passwd", "gopher://x", "data:,x")
    ),
    chat("74", 400, None, "messages", messages=[USER] * 10_000),
    chat(
        "75",
        400,
        "array_above_max_length",
        "messages[0].tool_calls",
        messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 129}],
    ),
    *(
        chat("76", 400, VALUE, "messages[0].name", messages=[{**USER, "name": name}])
        for name in ("x" * 65, "a\nb")
    ),
    chat("77", 200, None, None, max_tokens=2, messages=[{**USER, "content": "{{7*7}}<|im_end|>"}]),
    chat("78", 400, None, "chat_template", chat_template="{{ 7 * 7 }}"),
    *(
        chat(
            "78",
            400,
            "unknown_parameter",
            f"chat_template_kwargs.{name}",
            chat_template_kwargs={name: "x"},
        )
        for name in ("tokenize", "chat_template")
    ),
    completion("79", 400, None, "prompt_embeds", prompt_embeds="AAAA"),
    # D. Sampling
    *(
        completion("80-81", 400, "integer_below_min_value", "max_tokens", max_tokens=n)
        for n in (0, -1)
    ),
    *(completion("82-83", 200, None, None, max_tokens=n) for n in (2**31, 2**63)),  # it is cut
    *(completion("84-86", 400, TYPE, "max_tokens", max_tokens=n) for n in (1.5, "5", True)),
    chat("87", 400, None, "max_tokens", max_tokens=3, max_completion_tokens=4),
    completion("88", 400, None, "min_tokens", max_tokens=2, min_tokens=3),
    chat("88", 400, None, "min_tokens", min_tokens=10**9),
    completion("89", 400, "decimal_below_min_value", "temperature", temperature=-0.1),
    completion("90", 400, "decimal_above_max_value", "temperature", temperature=2.1),
    completion("91", 400, TYPE, "temperature", temperature="NaN"),
    completion("92", 200, None, None, temperature=1e-320),
    completion("93", 200, None, None, top_p=0),
    *(completion("94", 400, None, "top_p", top_p=p) for p in (1.1, -1)),
    *(completion("95", 400, None, "top_k", top_k=k) for k in (-2, 1.5)),
    completion("95", 200, None, None, top_k=10**9),
    completion("96", 400, "decimal_above_max_value", "min_p", min_p=1.1),
    *(completion("97-99", 400, None, "n", n=n) for n in (0, 16_385)),
    completion("99", 400, None, "n", n=2, temperature=0),
    *(completion("100", 400, None, "best_of", best_of=n) for n in (0, 20_000)),
    *(
        completion("101", 400, None, name, **{name: v})
        for name in ("presence_penalty", "frequency_penalty")
        for v in (2.1, -2.1)
    ),
    *(completion("102", 400, None, "repetition_penalty", repetition_penalty=v) for v in (0, -1)),
    *(completion("103", 400, None, "logprobs", logprobs=n) for n in (-2, 10**6)),
    chat("105", 400, None, "top_logprobs", logprobs=True, top_logprobs=10**6),
    chat("106", 400, None, "top_logprobs", top_logprobs=3),
    *(completion("107", 400, None, "seed", seed=s) for s in (2**64, -(2**63) - 1, "x", 1.5)),
    *(completion("108", 400, None, "stop", stop=s) for s in ("", [""], [None], ["a"] * 65)),
    completion("109", 400, "string_above_max_length", "stop", stop="a" * 10**6),
    *(
        completion("110", 400, None, "stop_token_ids", stop_token_ids=t)
        for t in ([5] * 10**5, [-1], [99_999])
    ),
    *(
        completion("111-114", 400, None, None, logit_bias=bias)
        for bias in (
            *({"abc": 1}, {"-1": 1}, {"999999": 1}, {"5": 101}),
            {str(i): 1 for i in range(10_000)},
        )
    ),
    *(completion("115", 400, None, None, allowed_token_ids=t) for t in ([], [999_999], [-1])),
    *(
        completion("116", 400, None, None, bad_words=w)
        for w in ([""], [f"x{i}" for i in range(10_000)])
    ),
    completion("117", 200, None, None, prompt=[5] * 100, ignore_eos=True),
    completion("118", 200, None, None, prompt=[5] * 127, echo=True, logprobs=5, max_tokens=0),
    *(completion("119", 400, TYPE, "stream", stream=s) for s in ("yes", 1)),
    completion("120", 400, VALUE, "stream_options", stream_options={"include_usage": True}),
    completion(
        "121", 400, "unknown_parameter", "stream_options.x", stream=True, stream_options={"x": 1}
    ),
    completion("122", 400, None, "suffix", suffix="x"),
    completion("124", 400, TYPE, "user", user=5),
    completion("125", 200, None, None, foo=1),
    # E. Structured output and tools, as far as they are text
    completion("127", 400, None, None, response_format={"type": "foo"}),
    chat("142", 400, None, "tool_choice", tools=[], tool_choice="auto"),
    chat("144", 400, None, "tool_choice", tool_choice="required"),
    chat("145", 400, None, "tools[0].custom", tools=[{"type": "custom"}]),
    chat(
        "145",
        400,
        None,
        "tools[0].function.name",
        tools=[{"type": "function", "function": {"name": "x" * 65}}],
    ),
    chat("146", 400, None, "tools", tools=[{"type": "function", "function": {"name": "f"}}] * 129),
    chat(
        "148",
        200,
        None,
        None,
        max_tokens=2,
        messages=[
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            USER,
        ],
    ),
    chat("149", 400, TYPE, "parallel_tool_calls", parallel_tool_calls="x"),
]


async def ask(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    if isinstance(body, tuple):
        return await client.post(path, content=body[0], headers=body[1])
    return await client.post(path, content=json.dumps(body), headers=JSON)


def check(response: httpx.Response, status: int, code: str | None, param: str | None) -> None:
    assert response.status_code == status, response.text[:300]
    assert len(response.content) < MOST_BYTES
    if status == 200:
        return
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] and error["message"] and len(error["message"]) < 1100
    assert "Traceback" not in response.text and "/tmp" not in response.text
    assert code in (None, error["code"]), error
    assert param in (None, error["param"]), error


async def test_every_row_beside_running_streams(
    client: httpx.AsyncClient, live: LiveEngine
) -> None:
    """Each gets its answer, and other streams do not notice: same tokens, no page lost."""
    alone = (await client.post(C, json=VICTIM)).json()["choices"][0]["text"]
    enough, heard = asyncio.Event(), 0

    async def victim() -> None:
        nonlocal heard
        while not enough.is_set():
            text = ""
            async with client.stream("POST", C, json={**VICTIM, "stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            assert text == alone
            heard += 1

    victims = [asyncio.create_task(victim()) for _ in range(3)]
    wrong = []
    for row, path, body, status, code, param in ROWS:
        started = time.monotonic()
        answer = await asyncio.wait_for(ask(client, path, body), HANG)
        if (seconds := time.monotonic() - started) > SLOW:
            logger.warning("row %s took %.1f s", row, seconds)
        try:
            check(answer, status, code, param)
        except AssertionError as error:
            wrong.append(f"row {row} {str(body)[:120]}: {error}")
    enough.set()
    await asyncio.wait_for(asyncio.gather(*victims), HANG)
    assert not wrong, "\n".join(wrong)
    assert heard > 3
    await asyncio.wait_for(live.idle(), HANG)


Phase = Callable[[Any], bool]
PHASES: dict[str, Phase] = {
    "queued": lambda stats: stats.waiting > 0,
    "prefill": lambda stats: stats.running > 0 and stats.generation_tokens == 0,
    "decode": lambda stats: stats.generation_tokens > 5,
    "last token": lambda stats: stats.generation_tokens >= 60,
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["tokenizing", *PHASES])
async def test_leaving_in_any_phase_frees_every_page(
    app: Any, live: LiveEngine, phase: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, tokenizing = asyncio.Event(), asyncio.Event()
    body = {"prompt": [5] * 66, "max_tokens": 60, "ignore_eos": True, "stream": stream}
    inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    if phase == "queued":
        live.paused.set()
    elif phase == "tokenizing":
        begin = live.info

        async def slowly() -> EngineInfo:  # the last wait before the engine has the request
            tokenizing.set()
            await gone.wait()
            return await begin()

        monkeypatch.setattr(live, "info", slowly)

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    async def leave() -> None:
        if phase == "tokenizing":
            await tokenizing.wait()
        else:
            while not PHASES[phase](live.engine.stats()):
                await asyncio.sleep(0)
        gone.set()
        live.paused.clear()

    headers = [(b"host", b"a"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST"}
    scope |= {"path": C, "raw_path": C.encode(), "query_string": b"", "root_path": ""}
    scope |= {"scheme": "http", "headers": headers, "client": ("test", 1), "server": ("rayfin", 80)}
    leaving = asyncio.create_task(leave())
    await asyncio.wait_for(app(scope, receive, send), HANG)
    await asyncio.wait_for(leaving, HANG)
    await asyncio.wait_for(live.idle(), HANG)
    if phase != "last token":
        assert live.engine.stats().generation_tokens < 60

"""Tool calls and reasoning over chat completions: replies, streams, and streams that go on."""

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import EngineInfo, TokenLog
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from rayfin.deployments.text.tokenizer import Tokenizer
from wary import Wary, animals

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}\n</think>\n\n"
    "{% endif %}{% endif %}{% endif %}"
)
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TIME = {"name": "get_time", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BODY = {"messages": HELLO, "tools": TOOLS, "max_tokens": 500}

THOUGHT, TEXT = "I need the weather. END", "Let me look."
ARGUMENTS = ['{"city": "Paris \\u00e9"}', "{}"]
ANSWER = (
    f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS[0]}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_time", "arguments": {ARGUMENTS[1]}}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def marked(tokenizer_without_marks: Tokenizer) -> Tokenizer:
    backend = Backend.from_str(tokenizer_without_marks.backend.to_str())
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    backend.add_tokens([AddedToken(text, special=False) for text in marks])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    inner.chat_template = TEMPLATE
    return Tokenizer(inner)


@pytest.fixture(scope="module")
def tokenizer_without_marks(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer


@pytest.fixture
def service(engine: Any, marked: Tokenizer) -> OpenAIService:
    """A model whose calls and thoughts are known, and that says ANSWER."""
    engine.limits = EngineInfo("engine", 2048, marked.vocab_size, 1000, 4)
    say(engine, marked, ANSWER)
    formats = Detected(tools=TOOL_FORMATS["hermes"], reasoning=REASONING_FORMATS["think"])
    return OpenAIService(engine, marked, ["tiny"], 2048, formats=formats)


def say(engine: Any, tokenizer: Tokenizer, text: str) -> None:
    engine.reply = tokenizer.encode(text, False)


async def whole(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post(PATH, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


async def events(
    http: httpx.AsyncClient, last: str | None = None, **fields: Any
) -> list[tuple[str, Any]]:
    """(id, chunk) of every event but [DONE]."""
    headers = {"Accept": "text/event-stream"} if last is None else {"Last-Event-ID": last}
    body = {**BODY, "stream": True, **fields}
    response = await http.post(PATH, json=body, headers=headers)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        named = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((named.get("id", ""), named["data"]))
    assert found.pop() == ("", "[DONE]")
    return [(event_id, json.loads(data)) for event_id, data in found]


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A message from the deltas of choice 0, each of which holds one kind of part."""
    said: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "ends": [], "ids": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            kinds = {name.removesuffix("_content") for name in delta}
            assert kinds in ({"role", "content"}, {"reasoning"}, {"content"}, {"tool_calls"}, set())
            assert delta.get("reasoning") == delta.get("reasoning_content")
            said["reasoning"] += delta.get("reasoning", "")
            said["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                _add_call(said["calls"], call)
            said["ids"] += choice.get("token_ids") or []
            if choice["finish_reason"]:
                said["ends"].append(choice["finish_reason"])
    return said


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    if piece["index"] == len(calls):
        assert piece["type"] == "function"
        calls.append({"id": piece["id"], **piece["function"]})  # with what its last token begins
    else:
        assert piece["index"] == len(calls) - 1, "calls interleave"
        assert piece.keys() == {"index", "function"} and piece["function"]["arguments"]
        calls[-1]["arguments"] += piece["function"]["arguments"]


async def test_a_whole_answer(openai: AsyncOpenAI, marked: Tokenizer) -> None:
    reply = await openai.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)  # type: ignore[call-overload]
    message = reply.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == (
        *(TEXT, THOUGHT, THOUGHT),
    )
    calls = message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "get_time"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris é"}, {}]
    assert len({call.id for call in calls}) == 2
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in calls)
    assert reply.choices[0].finish_reason == "tool_calls"
    details = reply.usage.completion_tokens_details
    assert details.reasoning_tokens == len(marked.encode(f"\n{THOUGHT}\n", False))


@pytest.mark.parametrize("lease", [1, 4, 999])
@pytest.mark.parametrize("interval", [1, 7])
async def test_a_stream_is_the_whole_answer(
    http: httpx.AsyncClient, engine: Any, lease: int, interval: int
) -> None:
    engine.lease = lease
    chunks = [chunk for _, chunk in await events(http, stream_interval=interval)]
    said = joined(chunks)
    assert (said["reasoning"], said["content"]) == (THOUGHT, TEXT)
    assert [call["name"] for call in said["calls"]] == ["get_weather", "get_time"]
    assert [call["arguments"] for call in said["calls"]] == ARGUMENTS
    assert said["ends"] == ["tool_calls"]
    assert (chunks[-1]["choices"][0]["delta"] == {}) == (lease < 999)


@pytest.mark.parametrize("lease", [1, 5, 999])
@pytest.mark.parametrize("lost", [False, True])
async def test_a_stream_goes_on_after_any_event(
    http: httpx.AsyncClient, engine: Any, lease: int, lost: bool
) -> None:
    """In a thought, a name, arguments or between two parts of one delta: each part comes once."""
    fields = {"return_token_ids": True, "seed": 7}
    engine.lease = lease
    expected = await events(http, **fields)
    logs: dict[str, TokenLog] = dict(engine.logs)
    ids = [event_id for event_id, _ in expected]
    assert all(ids) and len(set(ids)) == len(ids)
    for at, (last, _) in enumerate(expected):
        engine.logs = {} if lost else dict(logs)
        engine.lease = 1 if lost else lease
        rest = await events(http, last, **fields)
        head = [chunk for _, chunk in expected[: at + 1]]
        got = joined(head + [chunk for _, chunk in rest])
        assert got == joined([chunk for _, chunk in expected]), last
        if rest and lost:  # and again
            again = await events(http, rest[0][0], **fields)
            chunks = [*head, rest[0][1], *(chunk for _, chunk in again)]
            assert joined(chunks) == got, (last, rest[0][0])


ALL_OF_IT: dict[str, Any] = {
    "logprobs": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@pytest.mark.parametrize("lease", [1, 2, 3, 7, 999])
@pytest.mark.parametrize("said", [ANSWER, "Hi <tool", "Look 👩", "<think>\nhm</th", "<think>hm\n"])
async def test_each_chunk_has_the_tokens_that_it_tells(
    http: httpx.AsyncClient, engine: Any, marked: Tokenizer, said: str, lease: int
) -> None:
    """Of text that a parser has held back, too, which comes in one chunk with the end."""
    say(engine, marked, said)
    engine.lease = lease
    *chunks, last = [chunk for _, chunk in await events(http, **ALL_OF_IT)]
    first, *choices = [chunk["choices"][0] for chunk in chunks]
    assert (first["delta"]["role"], chunks[0]["usage"]["completion_tokens"]) == ("assistant", 0)
    ids: list[int] = []
    for chunk, choice in zip(chunks[1:], choices, strict=True):
        entries = choice["logprobs"]["content"]
        assert choice["token_ids"] and len(entries) == len(choice["token_ids"])
        assert [own["token"] for own in entries] == [*map(marked.token_text, choice["token_ids"])]
        ids += choice["token_ids"]
        assert chunk["usage"]["completion_tokens"] == len(ids)
    assert ids == [*engine.reply, engine.eos]
    assert last["usage"]["completion_tokens"] == len(ids)
    assert [choice["finish_reason"] is None for choice in choices[-2:]] in ([True, False], [False])
    if said in ("Hi <tool", "<think>\nhm</th"):
        shown = [choice["delta"] for choice in choices if choice["delta"]]
        assert shown[-1].popitem()[1].endswith(("<tool", "</th"))


async def test_two_choices_have_calls_of_their_own(http: httpx.AsyncClient) -> None:
    reply = await whole(http, n=2)
    ids = [call["id"] for own in reply["choices"] for call in own["message"]["tool_calls"]]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
        ("both", {"reasoning", "reasoning_content"}),
    ],
)
async def test_the_name_of_reasoning(
    http: httpx.AsyncClient, service: OpenAIService, field: Any, names: set[str]
) -> None:
    service.formats = replace(service.formats, reasoning_field=field)
    message = (await whole(http))["choices"][0]["message"]
    assert {name for name in message if message[name]} == {"role", "content", "tool_calls", *names}
    chunks = [chunk for _, chunk in await events(http)]
    found = {name for chunk in chunks for own in chunk["choices"] for name in own["delta"]}
    assert found == {"role", "content", "tool_calls", *names}


async def test_reasoning_may_be_hidden_and_counts(http: httpx.AsyncClient, engine: Any) -> None:
    reply = await whole(http, include_reasoning=False)
    message = reply["choices"][0]["message"]
    assert {name for name in message if message[name]} == {"role", "content", "tool_calls"}
    assert message["content"] == TEXT
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    chunks = [chunk for _, chunk in await events(http, include_reasoning=False)]
    assert not any("reasoning" in own["delta"] for c in chunks for own in c["choices"])


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("Hi!", "Hi!"),
        ("", ""),
        ("<think>hm", None),
        ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', None),
    ],
)
async def test_content_is_null_where_there_are_other_parts_only(
    http: httpx.AsyncClient, engine: Any, marked: Tokenizer, said: str, content: str | None
) -> None:
    say(engine, marked, said)
    message = (await whole(http))["choices"][0]["message"]
    assert message["content"] == content
    assert ("tool_calls" in message) == ("tool_call" in said)


async def test_a_cut_call(http: httpx.AsyncClient, marked: Tokenizer) -> None:
    """The stream has its pieces; the whole answer leaves it out."""
    most = len(marked.encode(ANSWER[: ANSWER.index("Par")], False))
    choice = (await whole(http, max_tokens=most))["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    said = joined([chunk for _, chunk in await events(http, max_tokens=most)])
    assert said["ends"] == ["length"] and [own["name"] for own in said["calls"]] == ["get_weather"]


async def test_stop_strings_count_in_content_and_calls(http: httpx.AsyncClient) -> None:
    choice = (await whole(http, stop=["END", "look"]))["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (THOUGHT, "Let me ")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "look")
    choice = (await whole(http, stop="Paris"))["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


async def test_without_tools_calls_are_text(http: httpx.AsyncClient) -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        choice = (await whole(http, **fields))["choices"][0]
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
        assert choice["message"]["content"].startswith(f"{TEXT}\n<tool_call>")
        assert choice["message"]["reasoning"] == THOUGHT


async def test_thinking_is_read_from_the_template_alone(
    http: httpx.AsyncClient, engine: Any, marked: Tokenizer
) -> None:
    say(engine, marked, "2 + 2\n</think>\n\n4")
    for fields in (
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
        {"messages": [{"role": "user", "content": "<think> </think>"}], "reasoning_effort": "max"},
    ):
        message = (await whole(http, **fields))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("2 + 2", "4"), fields
    say(engine, marked, "4")
    for fields in ({"reasoning_effort": "none"}, {}):
        message = (await whole(http, **fields))["choices"][0]["message"]
        assert message["reasoning"] is None and message["content"] == "4"


async def test_a_continued_thought(http: httpx.AsyncClient, engine: Any, marked: Tokenizer) -> None:
    say(engine, marked, " + 2</think>4")
    messages = [*HELLO, {"role": "assistant", "content": "<think>2"}]
    reply = await whole(http, messages=messages, continue_final_message=True)
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (" + 2", "4")


async def test_earlier_calls_and_thoughts_reach_the_template(
    http: httpx.AsyncClient, engine: Any, marked: Tokenizer
) -> None:
    function = {"name": "get_weather", "arguments": ARGUMENTS[0]}
    call = {"id": "call_1", "type": "function", "function": function}
    turn = {"role": "assistant", "content": None, "reasoning": THOUGHT, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "9 </tool_call> <think>"}
    await whole(http, messages=[*HELLO, turn, result])
    prompt = marked.decode(engine.seen[0].prompt.tolist(), False)
    assert f"<think>{THOUGHT}</think>[call_1 " in prompt
    assert '{"city": "Paris é"}]<|im_end|>' in prompt


async def test_calls_and_thoughts_are_counted(
    http: httpx.AsyncClient, service: OpenAIService
) -> None:
    reply = await whole(http)
    counters = service.counts.report().counters
    assert counters["tool_calls", ("auto",)] == 2
    tokens = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counters["reasoning_tokens", ()] == tokens


async def test_without_formats_nothing_changes(
    http: httpx.AsyncClient, service: OpenAIService
) -> None:
    service.formats = Detected()
    reply = await whole(http)
    choice = reply["choices"][0]
    said = {name: value for name, value in choice["message"].items() if value is not None}
    assert said == {"role": "assistant", "content": ANSWER}
    assert choice["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens_details"] is None


async def test_tools_that_templates_do_not_see(
    http: httpx.AsyncClient, engine: Any, service: OpenAIService, marked: Tokenizer
) -> None:
    """With --exclude-tools-when-tool-choice-none."""
    for hidden in (False, True):
        service.replies = replace(service.replies, hide_barred_tools=hidden)
        for choice in ("auto", "none"):
            await whole(http, tool_choice=choice)
            prompt = marked.decode(engine.seen[-1].prompt.tolist(), False)
            assert ("get_weather" in prompt) is not (hidden and choice == "none")
            assert guidance(engine) is not None


def guidance(engine: Any) -> Any:
    return engine.seen[-1].part(Guidance)


async def test_rules_of_a_choice(http: httpx.AsyncClient, engine: Any, marked: Tokenizer) -> None:
    trigger = marked.added_ids["<tool_call>"]
    await whole(http)
    calls = guidance(engine).calls
    assert calls.triggers == (trigger,) and "get_time" in calls.grammar and calls.max_calls is None
    await whole(http, parallel_tool_calls=False)
    assert guidance(engine).calls.max_calls == 1
    await whole(http, tool_choice="none")
    assert guidance(engine).forbidden == (trigger,) and guidance(engine).calls is None
    named = {"type": "function", "function": {"name": "get_time"}}
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    await whole(http, tool_choice=only)
    assert "get_weather" not in guidance(engine).calls.grammar
    await whole(http, tools=None)
    assert guidance(engine) is None


async def test_forced_calls_begin_after_the_thought(
    http: httpx.AsyncClient, engine: Any, marked: Tokenizer
) -> None:
    """Cut before a name there is no call, and the content is empty."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, name in (("required", "get_time"), (named, "get_weather")):
        reply = await whole(http, tool_choice=choice, reasoning_effort="high", max_tokens=3)
        rules = guidance(engine)
        assert rules.thinking.starts_inside and name in rules.grammar and rules.calls is None
        say(engine, marked, "hm</think><tool_call>")
        reply = await whole(http, tool_choice=choice, reasoning_effort="high", max_tokens=4)
        message = reply["choices"][0]["message"]
        assert message["content"] == "" and "tool_calls" not in message
    assert guidance(engine).thinking.calls == (marked.added_ids["<tool_call>"],)
    say(engine, marked, ANSWER.partition(f"{TEXT}\n")[2].partition("\n<tool_call>")[0])
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        (answer,) = (await whole(http, tool_choice=choice))["choices"]
        assert (answer["finish_reason"], answer["message"]["content"]) == (reason, "")
        assert len(answer["message"]["tool_calls"]) == 1


async def test_a_budget_of_thought(
    http: httpx.AsyncClient, engine: Any, marked: Tokenizer, service: OpenAIService
) -> None:
    budget = len(marked.encode(f"\n{THOUGHT}\n", False))
    await whole(http, tools=None, thinking_token_budget=budget)
    thinking = guidance(engine).thinking
    assert (thinking.budget, thinking.close_ids) == (budget, (marked.added_ids["</think>"],))
    assert service.counts.thinking_budgets_spent == 1
    await whole(http, tools=None, thinking_token_budget=-1)
    assert guidance(engine) is None


async def test_schemas_that_cannot_be_held(http: httpx.AsyncClient, engine: Any) -> None:
    """Strict: 400 with the path. Not strict and forced: any object, and a header says so."""

    def tools(strict: bool, **schema: Any) -> list[Any]:
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        function = {"name": "f", "parameters": parameters, "strict": strict}
        return [{"type": "function", "function": function}]

    unique = {"type": "array", "uniqueItems": True}
    error = (await http.post(PATH, json={**BODY, "tools": tools(True, **unique)})).json()["error"]
    assert error["code"] == "unsupported_schema"
    assert error["param"] == "tools[0].function.parameters.properties.a.uniqueItems"
    body = {**BODY, "tools": tools(False, **unique), "tool_choice": "required"}
    response = await http.post(PATH, json=body)
    assert response.status_code == 200 and "tools[0]" in response.headers["x-rayfin-unenforced"]


@pytest.mark.parametrize(
    ("refused", "unenforced"),
    [
        (('"zebra"',), "tools[0].function.parameters"),
        (('"zebra"', '"yak"'), "tools[0].function.parameters, tools[1].function.parameters"),
    ],
)
async def test_schemas_that_the_checker_refuses(
    http: httpx.AsyncClient,
    engine: Any,
    service: OpenAIService,
    marked: Tokenizer,
    refused: tuple[str, ...],
    unenforced: str,
) -> None:
    """Those that are too much, or all if only together they are; never strict ones."""
    service.checker = Wary(marked, *refused)

    async def ask(*strict: str) -> httpx.Response:
        body = {**BODY, "tools": animals(*strict), "tool_choice": "required"}
        return await http.post(PATH, json=body)

    response = await ask()
    assert response.status_code == 200, response.text
    assert response.headers["x-rayfin-unenforced"] == unenforced
    grammar = guidance(engine).grammar
    assert '"zebra"' not in grammar and ('"yak"' in grammar) == (len(refused) == 1)
    response = await ask("yak")
    assert response.headers["x-rayfin-unenforced"] == "tools[0].function.parameters"
    response = await ask("zebra", "yak")
    error = response.json()["error"]
    alone = len(refused) == 1
    assert (response.status_code, error["code"]) == (400, "schema_too_complex")
    assert error["param"] == ("tools[0].function.parameters" if alone else "tools")
    if alone:
        body = {**BODY, "tools": animals("zebra")[:1]}
        error = (await http.post(PATH, json=body)).json()["error"]
        assert (error["param"], error["code"]) == (
            "tools[0].function.parameters",
            "schema_too_complex",
        )


async def test_a_search_reads_calls_and_forces_none(
    http: httpx.AsyncClient, engine: Any, marked: Tokenizer
) -> None:
    search = {"use_beam_search": True, "n": 2, "max_tokens": 400}
    choices = (await whole(http, **search))["choices"]
    assert choices[0]["finish_reason"] == "tool_calls" and choices[0]["message"]["content"] == TEXT
    for choice in ("required", "none"):
        error = await http.post(PATH, json={**BODY, **search, "tool_choice": choice})
        assert error.json()["error"]["param"] == "use_beam_search"


async def test_calls_or_a_form(http: httpx.AsyncClient, engine: Any) -> None:
    """With ``auto`` an answer either calls or has the form; the form is no reasoning."""
    reply = await whole(http, response_format={"type": "json_object"})
    rules = guidance(engine)
    assert "get_weather" in rules.grammar and rules.calls is None and rules.thinking is not None
    assert reply["choices"][0]["message"]["tool_calls"]


SQL: Any = {
    "type": "custom",
    "custom": {
        "name": "sql",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "lark", "definition": 'start: "SELECT " /.+/'},
        },
    },
}


async def test_a_custom_tool(
    openai: AsyncOpenAI, http: httpx.AsyncClient, engine: Any, marked: Tokenizer
) -> None:
    """Its call has a text; the model writes one of a function."""
    query = 'SELECT "é"\\n'
    given = json.dumps({"name": "sql", "arguments": {"input": query}}, ensure_ascii=False)
    say(engine, marked, f"<tool_call>\n{given}\n</tool_call>")
    fields: Any = {"model": "tiny", "tools": [*TOOLS, SQL], "messages": HELLO}
    reply = await openai.chat.completions.create(**fields)
    message = reply.choices[0].message
    (call,) = message.tool_calls or ()
    assert call.type == "custom" and (call.custom.name, call.custom.input) == ("sql", query)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert any("SELECT " in text for text in engine.seen[-1].part(Guidance).grammars)
    assert "sql" in marked.decode(engine.seen[-1].prompt.tolist(), False)
    deltas = [
        piece
        async for chunk in await openai.chat.completions.create(**fields, stream=True)
        for piece in chunk.choices[0].delta.model_dump().get("tool_calls") or ()
    ]
    assert (deltas[0]["type"], deltas[0]["custom"]["name"]) == ("custom", "sql")
    assert "".join(piece["custom"]["input"] for piece in deltas) == query
    history = [*HELLO, message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "1 row"})
    choice = {"type": "custom", "custom": {"name": "sql"}}
    body = {**fields, "messages": history, "tool_choice": choice, "max_tokens": 3}
    assert (await http.post(PATH, json=body)).status_code == 200
    prompt = marked.decode(engine.seen[-1].prompt.tolist(), False)
    assert json.dumps({"input": query}, ensure_ascii=False) in prompt
    hosted = await http.post(PATH, json={**body, "tools": [SQL, {"type": "web_search"}]})
    assert hosted.headers["x-rayfin-ignored-fields"] == "tools.web_search"
    alone = {**body, "tools": [{"type": "web_search"}], "tool_choice": "auto"}
    assert (await http.post(PATH, json=alone)).status_code == 200
    del history[1]["tool_calls"][0]["custom"]["input"]
    refused = (await http.post(PATH, json=body)).json()["error"]
    assert refused["param"] == "messages[1].tool_calls[0].custom.input"


async def test_a_forced_call_wins_over_a_form(http: httpx.AsyncClient, engine: Any) -> None:
    form = {"type": "json_object"}
    body = {**BODY, "tool_choice": "required", "response_format": form}
    response = await http.post(PATH, json=body)
    assert response.headers["x-rayfin-unenforced"] == "response_format"
    assert "get_time" in engine.seen[-1].part(Guidance).grammar

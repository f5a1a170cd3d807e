"""Bodies that published agents send, recorded: each is answered, or refused in the words by which
its client goes on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from demo_model.tokenizer import CHAT_TEMPLATE
from rayfin.actors.messages import EngineInfo
from rayfin.deployments.api.app import build_api
from rayfin.deployments.batches.folder import BatchFolder
from rayfin.deployments.text.parsing.detect import detect
from rayfin.deployments.text.repair import TemplateRules

pytestmark = pytest.mark.anyio
FOLDER = Path(__file__).parent / "agent_bodies"
BODIES: dict[str, Any] = json.loads((FOLDER / "bodies.json").read_text())
TEMPLATES = {
    "demo": CHAT_TEMPLATE,
    **{
        name: (FOLDER / f"template_{name}.jinja").read_text()
        for name in ("system_first", "alternating", "one_call")
    },
}
RULES = {
    "demo": TemplateRules(),
    "system_first": TemplateRules(system_first=True),
    "alternating": TemplateRules(system_first=True, no_results=True, alternates=True),
    "one_call": TemplateRules(one_call=True),
}


class Right(NamedTuple):
    """What is right for a body."""

    status: int = 200
    ignored: tuple[str, ...] = ()  # in x-rayfin-ignored-fields
    begins: str = ""  # the message of a refusal
    details: dict[str, Any] | None = None
    repaired: dict[str, str] = {}  # by template: x-rayfin-messages-repaired


UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
RESULTS = {"alternating": "results"}
RIGHT = {
    "01_messages_context_management": Right(ignored=("context_management",)),
    "02_messages_mark_on_tool_use": Right(repaired=RESULTS),
    "03_messages_system_in_middle": Right(
        repaired={"system_first": "system", "alternating": "system,turns"}
    ),
    "04_messages_thread_create": Right(400, begins="Threads are not", details=UNTHREADED),
    "05_messages_thread_continue": Right(
        400, begins="Threads are not", details={"error_code": "thread_not_found"}
    ),
    "06_messages_tool_reference": Right(repaired=RESULTS),
    "07_messages_server_tool": Right(ignored=("tools.web_search_20250305",)),
    "08_messages_max_tokens": Right(),
    "09_messages_thinking_budget": Right(ignored=("thinking.budget_tokens",)),
    "10_messages_thinking_display": Right(ignored=("thinking.display",)),
    "11_messages_image_text_model": Right(400, begins="Could not process image"),
    "12_messages_document": Right(),
    "13_responses_namespace": Right(),
    "14_responses_web_search": Right(ignored=("tools.web_search",)),
    "15_responses_custom_lark": Right(),
    "16_responses_custom_items": Right(repaired=RESULTS),
    "17_responses_tool_search": Right(),
    "18_responses_two_developers": Right(
        repaired={"system_first": "system", "alternating": "system,turns"}
    ),
    "19_responses_forced_tool_and_format": Right(),
    "20_responses_stream_options": Right(),
    "21_chat_guided_and_structured": Right(ignored=("guided_decoding_backend", "guided_grammar")),
    "22_chat_two_users": Right(repaired={"alternating": "turns"}),
    "24_chat_custom_tool": Right(),
    "25_messages_batches": Right(404, begins="Batches are off: the server needs --batch-dir"),
    "23_chat_parallel_calls": Right(repaired={"alternating": "results,turns", "one_call": "calls"}),
}


async def test_a_long_history(http: httpx.AsyncClient, service: Any, tokenizer: Any) -> None:
    """3,201 messages, a mark on each block, are read in no time; the prompt is then too long."""
    service.chat_template = TEMPLATES["one_call"]
    service.formats = detect(tokenizer, service.chat_template)
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "a", **mark}
    used = [{"type": "tool_use", "id": i, "name": "f", "input": {}, **mark} for i in "xy"]
    gave = [{"type": "tool_result", "tool_use_id": i, "content": "b", **mark} for i in "yx"]
    turns = [
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": used},
        {"role": "user", "content": gave},
        {"role": "assistant", "content": [text]},
    ]
    body = {"max_tokens": 8, "messages": [*turns * 800, turns[0]]}
    answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")
    counted = await http.post("/v1/messages/count_tokens", json=body)
    assert counted.json()["input_tokens"] > 10_000


async def test_images_that_are_dropped(
    http: httpx.AsyncClient, engine: Any, service: Any, tokenizer: Any
) -> None:
    """For a model that reads none they are lines of text, in every API."""
    service.replies = replace(service.replies, drop_images=True)
    service.max_model_len = 4096
    engine.limits = EngineInfo("engine", 4096, tokenizer.vocab_size, 2000, 4)
    path, claudes = BODIES["11_messages_image_text_model"]
    url = "data:image/png;base64,aGk="
    said = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": url}]
    parts = [said[0], {"type": "image_url", "image_url": {"url": url}}]
    bodies = {
        path: {**claudes, "model": "tiny"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": parts}]},
        "/v1/responses": {"input": [{"role": "user", "content": said}]},
        "/api/generate": {"model": "tiny", "prompt": "look", "images": ["aGk="]},
    }
    for path, body in bodies.items():
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "An image was here" in tokenizer.decode(engine.seen[-1].prompt, False)


async def test_a_batch_of_messages_may_name_a_model_of_claudes(
    service: Any, tmp_path: Path
) -> None:
    app = build_api(service, batches=BatchFolder(tmp_path))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://rayfin"
    ) as client:
        for model, status in (("claude-sonnet-9", 200), ("other", 404)):
            line = {"custom_id": "a", "params": {"model": model, "max_tokens": 8, "messages": []}}
            answer = await client.post("/v1/messages/batches", json={"requests": [line]})
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", RIGHT)
async def test_agent_bodies(
    http: httpx.AsyncClient, engine: Any, service: Any, tokenizer: Any, name: str, template: str
) -> None:
    service.chat_template = TEMPLATES[template]
    service.formats = detect(tokenizer, service.chat_template)
    assert service.formats.rules == RULES[template]
    service.max_model_len = 4096
    engine.limits = EngineInfo("engine", 4096, tokenizer.vocab_size, 2000, 4)
    path, body = BODIES[name]
    right = RIGHT[name]
    answer = await http.post(path, json={**body, "model": "tiny"})
    assert answer.status_code == right.status, answer.text
    headers = answer.headers
    if right.status == 200:
        assert headers.get("x-rayfin-ignored-fields", "") == ",".join(right.ignored)
        assert headers.get("x-rayfin-messages-repaired", "") == right.repaired.get(template, "")
        return
    error = answer.json()["error"]
    assert error["message"].startswith(right.begins)
    assert error.get("details") == right.details

"""Anthropic's message batches with its client, over the real HTTP layer and worker."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from anthropic import AsyncAnthropic
from fastapi import FastAPI, Request

from rayfin.actors.errors import NotFound
from rayfin.deployments.batches import line_run, worker
from rayfin.deployments.batches.folder import BatchFolder
from rayfin.deployments.batches.message_batches import add_message_batch_routes
from rayfin.deployments.batches.routes import add_batch_routes
from rayfin.deployments.batches.worker import BatchWorker
from rayfin.deployments.http.anthropic_errors import AnthropicErrors
from rayfin.deployments.http.errors import add_error_handlers

pytestmark = pytest.mark.anyio
ASK: dict[str, Any] = {"model": "m", "max_tokens": 8}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BATCH_POLL_SECONDS", 0.01)
    monkeypatch.setattr(line_run, "BATCH_RECORD_SECONDS", 0.02)


class Site:
    """The routes over a folder, and a worker whose model repeats the question."""

    def __init__(self, path: Path) -> None:
        self.folder = BatchFolder(path)
        self.gate = asyncio.Event()
        self.gate.set()
        self.app = FastAPI()
        self.app.add_middleware(AnthropicErrors)
        add_error_handlers(self.app)
        add_batch_routes(self.app, self.folder)
        add_message_batch_routes(self.app, self.folder, self._resolve)

    async def _resolve(self, request: Request, name: str | None) -> None:
        if name not in ("m", "claude-x", None):
            raise NotFound(f"The model {name!r} does not exist.", "model")

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        said = json.loads(request.content)["messages"][0]["content"]
        await self.gate.wait()
        if said == "bad":
            error = {"type": "invalid_request_error", "message": "no"}
            return httpx.Response(400, json={"type": "error", "error": error})
        content = [{"type": "text", "text": said}]
        usage = {"input_tokens": 2, "output_tokens": 3}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
        ending = {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
        return httpx.Response(200, json={**message, "content": content, **ending})

    def client(self) -> AsyncAnthropic:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app))
        return AsyncAnthropic(api_key="x", base_url="http://x", http_client=http, max_retries=0)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        transport = httpx.MockTransport(self._answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            task = asyncio.create_task(BatchWorker(self.folder, client, "m".__eq__, 2).run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "batches")


def request_of(name: str, said: str, **more: Any) -> Any:
    return {"custom_id": name, "params": {**ASK, "messages": [_user(said)], **more}}


def _user(said: str) -> dict[str, str]:
    return {"role": "user", "content": said}


async def ended(client: AsyncAnthropic, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await client.messages.batches.retrieve(batch_id)).ended_at is None:
            await asyncio.sleep(0.01)
    return batch


async def test_a_batch(site: Site) -> None:
    client = site.client()
    made = await client.messages.batches.create(
        requests=[request_of("a", "héllo", model="claude-x"), request_of("b", "bad")]
    )
    assert made.id.startswith("msgbatch_") and made.processing_status == "in_progress"
    assert made.request_counts.processing == 2 and made.results_url is None
    with pytest.raises(anthropic.AnthropicError):
        await client.messages.batches.results(made.id)
    async with site.working():
        batch = await ended(client, made.id)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (1, 1, 0)
    assert batch.results_url == f"http://x/v1/messages/batches/{made.id}/results"
    found = {
        line.custom_id: line.result async for line in await client.messages.batches.results(made.id)
    }
    assert found["a"].type == "succeeded" and found["a"].message.content[0].text == "héllo"
    assert found["b"].type == "errored" and found["b"].error.error.message == "no"


async def test_a_batch_is_cancelled(site: Site) -> None:
    client = site.client()
    site.gate.clear()
    made = await client.messages.batches.create(
        requests=[request_of(f"r{i}", "hi") for i in range(9)]
    )
    async with site.working():
        cancelled = await client.messages.batches.cancel(made.id)
        assert cancelled.processing_status == "canceling" and cancelled.cancel_initiated_at
        batch = await ended(client, made.id)
    assert batch.request_counts.canceled == 9
    results = [line async for line in await client.messages.batches.results(made.id)]
    assert {line.result.type for line in results} == {"canceled"} and len(results) == 9


async def test_batches_are_listed(site: Site) -> None:
    client = site.client()
    ids = []
    for i in range(3):
        made = await client.messages.batches.create(requests=[request_of(f"r{i}", "hi")])
        ids.append(made.id)
    every = [batch.id async for batch in client.messages.batches.list(limit=2)]
    assert sorted(every) == sorted(ids)
    back = await client.messages.batches.list(before_id=every[2], limit=1)
    assert [batch.id for batch in back.data] == every[1:2] and back.has_more


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "requests must have 1 to"),
        ([request_of("a b", "x")], "A custom_id has 1 to 64"),
        ([request_of("a", "x"), request_of("a", "y")], "A custom_id has 1 to 64"),
        ([request_of("a", "x", stream=True)], "A batch has whole answers"),
        ([request_of("a", "x", model="other")], "The model 'other' does not exist"),
    ],
)
async def test_batches_that_are_refused(site: Site, requests: Any, message: str) -> None:
    with pytest.raises(anthropic.APIStatusError, match=message):
        await site.client().messages.batches.create(requests=requests)
    assert site.folder.batches() == [] and site.folder.files("") == []


async def test_a_batch_too_many_leaves_no_file(site: Site) -> None:
    site.folder.limits = replace(site.folder.limits, max_open=1, max_lines=1)
    batches = site.client().messages.batches
    await batches.create(requests=[request_of("a", "x", model=["m"])])
    with pytest.raises(anthropic.RateLimitError):
        await batches.create(requests=[request_of("a", "x")])
    with pytest.raises(anthropic.BadRequestError, match="requests must have 1 to 1"):
        await batches.create(requests=[request_of("a", "x"), request_of("b", "x")])
    assert len(site.folder.files("")) == 1


async def test_other_batches_are_not_there(site: Site) -> None:
    for batch_id in ("msgbatch_" + "0" * 32, "batch_" + "0" * 32, "x"):
        with pytest.raises(anthropic.NotFoundError):
            await site.client().messages.batches.retrieve(batch_id)

"""The log: one object a line, with the request's id, and nothing that clients wrote or keys."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import EngineUnavailable, RequestFailed
from rayfin.actors.processes.logs import set_up
from rayfin.deployments.api.app import build_api
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.anyio
CANARY = "canary-text"
KEY = "canary-key"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    logger = logging.getLogger("rayfin")
    before = logger.handlers, logger.level, logger.propagate
    stream = io.StringIO()
    set_up("json", "debug", stream, engine="e")
    yield stream
    logger.handlers, logger.level, logger.propagate = before


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


async def test_requests_that_fail_leave_no_words_behind(
    service: Any, engine: Any, log: io.StringIO
) -> None:
    service.edge.keys = ApiKeys.load([KEY])
    service.edge.admin_keys = ApiKeys.load([KEY + "-admin"])
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        chat = {"messages": [{"role": "user", "content": CANARY}]}
        bodies: list[tuple[str, Any]] = [
            ("/v1/completions", {"prompt": CANARY}),
            ("/v1/completions", {"prompt": CANARY, "stream": True}),
            ("/v1/completions", {"prompt": CANARY, "temperature": CANARY}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | {"model": CANARY}),
            ("/v1/responses", {"input": CANARY, "instructions": CANARY}),
            ("/v1/messages", chat | {"max_tokens": 5, "model": "tiny"}),
        ]
        failures: list[Any] = [
            None,
            RequestFailed("the engine failed"),
            EngineUnavailable("no engine is ready"),
        ]
        for number, error in enumerate(failures):
            engine.refusal = error
            for path, body in bodies:
                await http.post(path, json=body, headers={"X-Request-Id": f"label-{number}"})
        engine.refusal = None
        engine.failure = (1, ValueError("a bug"))
        for path, body in bodies:
            await http.post(path, json=body, headers={"X-Request-Id": "label-9"})
        await http.post("/v1/completions", json={}, headers={"authorization": "Bearer canary-no"})
        operator = {"authorization": f"Bearer {KEY}-admin"}
        assert (await http.post("/admin/wake", headers=operator)).status_code == 200
    assert "canary" not in log.getvalue()
    said = lines(log)
    assert {own["request_id"] for own in said} >= {"label-1", "label-2", "label-9"}
    assert all({"time", "level", "logger", "message", "engine"} <= own.keys() for own in said)
    (wake,) = [own for own in said if own["logger"] == "rayfin.admin"]
    assert "sends wake" in wake["message"]
    assert any("ValueError: a bug" in own.get("exception", "") for own in said)


def test_levels_and_lines_for_people(log: io.StringIO) -> None:
    logger = logging.getLogger("rayfin.http")
    set_up("text", "warning", log)
    logger.info("an unread line")
    logger.warning("over\nand out")
    assert log.getvalue().endswith("WARNING rayfin.http: over\nand out\n")
    log.truncate(0)
    log.seek(0)
    set_up("json", "info", log)
    logger.info("over\nand out: %d", 7)
    (line,) = lines(log)
    assert line["message"] == "over\nand out: 7" and line["time"].endswith("+00:00")
    assert "request_id" not in line

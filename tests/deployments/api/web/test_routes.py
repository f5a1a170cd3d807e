"""The page's files and its data, and who may have them."""

import re
from typing import Any

import httpx
import pytest

from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.deployments.api.app import build_api
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.paths import FILES

pytestmark = pytest.mark.anyio


def connect(service: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_api(service))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_the_page_is_whole_and_its_own(service: Any) -> None:
    """Every file that a file names is there, and none is of another host."""
    async with connect(service) as http:
        for path in FILES:
            answer = await http.get(path)
            assert answer.status_code == 200
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            named = re.findall(r"""(?:src|href|from) ?=? ?["'](/[^"']+)""", answer.text)
            assert set(named) <= FILES.keys()
            assert "//" not in re.sub(r"(?m)//.*$", "", answer.text)
        assert (await http.get("/ui/other.js")).status_code == 404


async def test_state(service: Any, engine: Any, shown: EngineSnapshot) -> None:
    engine.shown = [shown]
    async with connect(service) as http:
        state = (await http.get("/ui/state")).json()
    assert state["batches"] == []
    (model,) = state["models"]
    assert model["model"] == service.model_names[0]
    assert model["latency"] == {"ttft": [0.5, 2], "itl": [0.25, 5]}
    (own,) = model["engines"]
    assert own["running"][1] == {
        "id": 5, "phase": "prefill", "prompt": 40, "cached": 16, "output": 0, "pages": 3
    }  # fmt: skip
    assert own["pages"]["map"] == [[-3, 1], [0, 1], [1, 2], [-2, 10], [-1, 50]]


async def test_data_needs_the_key_and_the_page_does_not(service: Any) -> None:
    service.edge.keys = ApiKeys.load(["secret"])
    async with connect(service) as http:
        assert {(await http.get(path)).status_code for path in FILES} == {200}
        assert (await http.get("/ui/state")).status_code == 401
        assert (await http.get("/ui/other.js")).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert (await http.get("/ui/state", headers=key)).status_code == 200


async def test_off(service: Any) -> None:
    service.edge.web = False
    async with connect(service) as http:
        for path in (*FILES, "/ui/state"):
            assert (await http.get(path)).status_code == 404
    service.edge.keys = ApiKeys.load(["secret"])
    async with connect(service) as http:
        assert (await http.get("/ui")).status_code == 401

"""From Ray Serve LLM to Rayfin in three deploys, under load: no request is lost."""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from rayfin import LLM, SamplingParams

CLIENTS = 8
PROMPT, LENGTH = "What is 37 + 48?", 32
OLD = "the old application answers word by word"
STAND_IN = f"""
import asyncio, json
from ray import serve
from starlette.responses import StreamingResponse

@serve.deployment(max_ongoing_requests=100)
class StandIn:
    async def __call__(self, request):
        async def events():
            for word in {OLD.split()!r}:
                yield "data: " + json.dumps({{"choices": [{{"text": word + " "}}]}}) + "\\n\\n"
                await asyncio.sleep(0.02)
            yield "data: [DONE]\\n\\n"
        return StreamingResponse(events(), media_type="text/event-stream")

app = StandIn.bind()
"""


class Load:
    """Clients that ask one after another until they are stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = asyncio.Event()
        self.texts: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as http:
            await asyncio.gather(*(self._client(http) for _ in range(CLIENTS)))

    def stop(self) -> None:
        self._stopped.set()

    async def _client(self, http: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "stream": True}
        while not self._stopped.is_set():
            try:
                self.texts[await self._ask(http, body)] += 1
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(repr(error))

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        text = ""
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line.startswith("data: "):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        raise AssertionError("the stream broke off")


@pytest.fixture
def applications(tmp_path: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The old application and Rayfin's, as they stand in a Serve file."""
    (tmp_path / "stand_in_of_ray.py").write_text(STAND_IN)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    variables = {"env_vars": {"PYTHONPATH": path}}
    kwargs = {name: value for name, value in settings.items() if name != "model"}
    config = {
        "model_loading_config": {"model_id": "demo", "model_source": "demo"},
        "engine_kwargs": {**kwargs, "device": "cpu"},
    }
    old = {"name": "old", "import_path": "stand_in_of_ray:app", "runtime_env": variables}
    new = {
        **{"name": "rayfin-llm", "import_path": "rayfin.llm:build_openai_app"},
        **{"args": {"llm_configs": [config]}, "runtime_env": variables},
    }
    return old, new


def deploy(*applications: dict[str, Any]) -> None:
    client = _get_global_client()
    assert client is not None
    schema = ServeDeploySchema.model_validate({"applications": list(applications)})
    client.deploy_apps(schema, _blocking=False)


@pytest.mark.thorough(reason="three deploys under load; `make test` has test_ray_home.py")
def test_three_deploys_lose_no_request(
    served: str,
    applications: tuple[dict[str, Any], dict[str, Any]],
    solo: LLM,
    eventually: Callable[..., Any],
) -> None:
    old, new = applications

    def running(*names: str) -> bool:
        states = serve.status().applications
        return all(name in states and states[name].status == "RUNNING" for name in names)

    async def switch(load: Load) -> None:
        loading = asyncio.create_task(load.run())
        try:
            steps: tuple[tuple[tuple[dict[str, Any], ...], tuple[str, ...]], ...] = (
                (
                    (old | {"route_prefix": "/llm"}, new | {"route_prefix": "/new"}),
                    ("old", "rayfin-llm"),
                ),
                (
                    (old | {"route_prefix": "/old"}, new | {"route_prefix": "/llm"}),
                    ("old", "rayfin-llm"),
                ),
                ((new | {"route_prefix": "/llm"},), ("rayfin-llm",)),
            )
            for step, names in steps:
                await asyncio.to_thread(deploy, *step)
                await asyncio.sleep(1)
                await asyncio.to_thread(eventually, lambda n=names: running(*n), "it runs")
                await asyncio.sleep(2)
        finally:
            load.stop()
            await loading

    deploy(old | {"route_prefix": "/llm"})
    eventually(lambda: running("old"), "the old application runs")
    load = Load(f"{served}/llm")
    try:
        asyncio.run(switch(load))
    finally:
        deploy()
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    answer = solo.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    assert load.failures == []
    assert set(load.texts) == {f"{OLD} ", answer}
    assert min(load.texts.values()) > CLIENTS

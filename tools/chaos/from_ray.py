"""The switch from another application to Rayfin in three deploys, under load (docs/from-ray.md)."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster import PATIENCE, Cluster
from load import Ask, Asks, Load
from nemesis import Nemesis
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

PREFIX = "/llm"  # that clients know
SETTLE_SECONDS = 2.0  # after a deploy: proxies hear of it, and old streams end


class Lines(Asks):
    """Streams that the stand-in can answer too: one choice, whole."""

    def stream(self) -> Ask:
        return replace(self.line(), stream=True)


def switch_under_load(streams: int, requests: int) -> Callable[[Nemesis], Awaitable[None]]:
    """Switches under so many open streams, which are at least ``requests`` in the end."""

    async def act(nemesis: Nemesis) -> None:
        cluster = nemesis.cluster
        old, new = applications(cluster)
        load = Load(f"{cluster.url}{PREFIX}", cluster.model, Lines(nemesis.random.randrange(10**6)))
        await deploy(nemesis, at(old, PREFIX))
        try:
            async with load.running(streams, 0):
                await load.all_streaming(streams)
                for step in (
                    (at(old, PREFIX), at(new, "/new")),
                    (at(old, "/old"), at(new, PREFIX)),
                    (at(new, PREFIX),),
                ):
                    nemesis.strike()
                    await deploy(nemesis, *step)
                await nemesis.until(lambda: len(load.records) >= requests, "all requests are sent")
        finally:
            nemesis.load.records += load.records
            await deploy(nemesis)

    return act


def applications(cluster: Cluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """The old application and Rayfin's, as they stand in a Serve file."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    variables = {"env_vars": {"PYTHONPATH": path}}
    config = {
        "model_loading_config": {"model_id": cluster.model, "model_source": cluster.weights},
        "engine_kwargs": {
            **{"device": "cpu", "threads": 1, "spare_runners": 0, "kv_peers": False},
            "kv_cache_memory": 4 * 2**20,
        },
    }
    old = {"name": "old", "import_path": "stand_in:app", "runtime_env": variables}
    new = {"name": "llm", "import_path": "rayfin.llm:build_openai_app"}
    return old, new | {"args": {"llm_configs": [config]}, "runtime_env": variables}


def at(application: dict[str, Any], prefix: str) -> dict[str, Any]:
    return application | {"route_prefix": prefix}


async def deploy(nemesis: Nemesis, *applications: dict[str, Any]) -> None:
    """What ``serve deploy`` does with a file of these, until they run."""
    client = _get_global_client()
    assert client is not None
    schema = ServeDeploySchema.model_validate({"applications": list(applications)})
    await asyncio.to_thread(client.deploy_apps, schema, _blocking=False)
    await asyncio.sleep(SETTLE_SECONDS)

    def running() -> bool:
        states = serve.status().applications
        return all(states[own["name"]].status == "RUNNING" for own in applications)

    await nemesis.until(running, "the applications run", PATIENCE)
    await asyncio.sleep(SETTLE_SECONDS)

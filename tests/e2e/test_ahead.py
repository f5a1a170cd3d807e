"""An engine that was started ahead of its supervisor, and dies before that comes."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RayError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidConfig
from rayfin.actors.processes.identity import Process
from rayfin.actors.processes.registry import engine_names, find_actor
from rayfin.actors.supervision.early_engine import EarlyEngine
from rayfin.deployments.app import bind_app
from rayfin.deployments.client.engine_names import ENGINE, engine_prefix
from rayfin.deployments.serve.preflight import located
from rayfin.deployments.serve.server_args import ServerArgs

NAME = "ahead"
PREFIX = engine_prefix(NAME, ENGINE)
QUESTION = {"messages": [{"role": "user", "content": "What is 37 + 48?"}], "temperature": 0}


@pytest.fixture(autouse=True)
def nothing_is_left(served: str, eventually: Callable[..., Any]) -> Iterator[None]:
    yield
    if NAME in serve.status().applications:
        serve.delete(NAME)
    eventually(lambda: not engine_names(PREFIX), "no engine is left")


def scheduler() -> Any:
    (name,) = engine_names(PREFIX)
    return find_actor(name)


def begin(args: EngineArgs) -> EarlyEngine:
    ahead = EarlyEngine(located(args), PREFIX)
    ahead.await_scheduler()
    return ahead


def kill(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def check(deploy: Callable[..., Any], served: str, args: EngineArgs) -> None:
    """The application starts with one engine, and answers."""
    deployed = deploy(bind_app(ServerArgs(), args), NAME, served, f"/{NAME}")
    with deployed.client() as http:
        answer = http.post("/v1/chat/completions", json=QUESTION).raise_for_status().json()
    assert "85" in answer["choices"][0]["message"]["content"]
    assert len(engine_names(PREFIX)) == 1


def test_its_scheduler_dies_while_it_loads(
    deploy: Callable[..., Any], served: str, settings: dict[str, Any]
) -> None:
    args = EngineArgs(**settings)
    ahead = begin(args)
    kill(ray.get(scheduler().process.remote()))
    check(deploy, served, args)
    assert ahead.refusal is None


def test_its_runner_dies_before_it_is_claimed(
    deploy: Callable[..., Any],
    served: str,
    settings: dict[str, Any],
    eventually: Callable[..., Any],
) -> None:
    args = EngineArgs(**settings)
    begin(args)

    def ready() -> bool:
        with suppress(RayError, EngineUnavailable):
            return bool(ray.get(scheduler().info.remote()))
        return False

    eventually(ready, "the engine is ready")
    process = ray.get(scheduler().process.remote())
    (runner,) = ray.get(scheduler().runners.remote())
    kill(runner)
    check(deploy, served, args)
    assert ray.get(scheduler().process.remote()) == process, "the engine is claimed"
    assert ray.get(scheduler().runners.remote()) != [runner]


def test_a_load_that_fails_leaves_nothing(
    settings: dict[str, Any], eventually: Callable[..., Any]
) -> None:
    ahead = begin(EngineArgs(**{**settings, "kv_cache_memory": 20_000}))
    refusal = eventually(lambda: ahead.refusal, "it refuses its model")
    assert isinstance(refusal, InvalidConfig) and "kv_cache_memory" in str(refusal)
    eventually(lambda: not engine_names(PREFIX), "its processes are gone")

"""Spare runners: processes that take over from a runner that is killed under streams."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RayError

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs
from rayfin.actors.processes.registry import find_actor, runner_name
from rayfin.actors.runner.spare import RunnerState
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs

LENGTH = 400
PROMPT = "The capital of France is"
NAME = "spares"


@pytest.fixture(scope="module")
def spared(deploy: Callable[..., Any], served: str, settings: dict[str, Any]) -> Iterator[Any]:
    engine = EngineArgs(**{**settings, "spare_runners": 1})
    yield deploy(bind_app(ServerArgs(), engine), NAME, served, f"/{NAME}")
    if NAME in serve.status().applications:
        serve.delete(NAME)


@pytest.fixture
def engine_name(spared: Any) -> str:
    name: str = ray.get(spared.scheduler().info.remote()).name
    return name


def states(engine: str) -> list[RunnerState]:
    """Of the processes under the names of the engine's runners."""
    answers: list[RunnerState] = []
    for seat in range(2):
        if (actor := find_actor(runner_name(engine, seat))) is not None:
            with suppress(RayError):  # it has just died
                answers.append(ray.get(actor.ping.remote()))
    return answers


def pids(engine: str, *, serves: bool) -> list[int]:
    return [state.process.pid for state in states(engine) if state.serves == serves]


def wait_for_spare(
    spared: Any, engine: str, eventually: Callable[..., Any], but: int | None = None
) -> int:
    """The process id of the spare once it is ready, and is not ``but``."""

    def ready() -> int | None:
        found = pids(engine, serves=False) if spared.stats().spare_runners == 1 else []
        return found[0] if found and found[0] != but else None

    pid: int = eventually(ready, "a spare is ready")
    return pid


def tokens_while(spared: Any, act: Callable[[], None]) -> list[int]:
    """The tokens of a stream during which ``act`` is called, once."""
    settings = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
    body = {"prompt": PROMPT, "return_token_ids": True, **settings}
    tokens: list[int] = []
    acted = False

    async def read() -> None:
        nonlocal acted
        async with spared.async_client() as http:
            async for event in spared.stream(http, body):
                tokens.extend(event["choices"][0]["token_ids"])
                if len(tokens) > 10 and not acted:
                    assert len(tokens) < LENGTH, "the stream had ended before"
                    await asyncio.to_thread(act)
                    acted = True

    asyncio.run(read())
    assert acted
    return tokens


@pytest.fixture
def expected(solo: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    return solo.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids


def test_a_spare_takes_over_and_is_replaced(
    spared: Any, engine_name: str, expected: list[int], eventually: Callable[..., Any]
) -> None:
    before = spared.stats()
    for turn in range(1, 3):  # the second time under the name of the first runner
        spare = wait_for_spare(spared, engine_name, eventually)
        (runner,) = pids(engine_name, serves=True)
        assert runner != spare
        killed = lambda pid=runner: os.kill(pid, signal.SIGKILL)  # noqa: E731
        assert tokens_while(spared, killed) == expected
        assert [each.pid for each in ray.get(spared.scheduler().runners.remote())] == [spare]
        assert pids(engine_name, serves=True) == [spare]
        stats = spared.stats()
        assert stats.epoch - before.epoch == stats.runner_restarts - before.runner_restarts == turn


def test_a_killed_spare_comes_back_and_no_stream_notices(
    spared: Any, engine_name: str, expected: list[int], eventually: Callable[..., Any]
) -> None:
    spare, before = wait_for_spare(spared, engine_name, eventually), spared.stats().epoch
    assert tokens_while(spared, lambda: os.kill(spare, signal.SIGKILL)) == expected
    wait_for_spare(spared, engine_name, eventually, but=spare)
    assert spared.stats().epoch == before


def test_the_next_scheduler_finds_the_runner_under_any_name(
    spared: Any, engine_name: str, expected: list[int], eventually: Callable[..., Any]
) -> None:
    spare = wait_for_spare(spared, engine_name, eventually)
    (runner,) = pids(engine_name, serves=True)
    old = spared.scheduler()
    assert tokens_while(spared, lambda: ray.kill(old)) == expected
    assert [each.pid for each in ray.get(spared.scheduler().runners.remote())] == [runner]
    wait_for_spare(spared, engine_name, eventually, but=spare)


def test_an_application_that_is_deleted_leaves_no_spare(
    spared: Any, engine_name: str, eventually: Callable[..., Any]
) -> None:
    wait_for_spare(spared, engine_name, eventually)
    processes = [state.process for state in states(engine_name)]
    assert len(processes) == 2
    serve.delete(NAME)
    for process in processes:
        eventually(lambda pid=process.pid: not os.path.exists(f"/proc/{pid}"), "it has ended")
    assert all(find_actor(runner_name(engine_name, seat)) is None for seat in range(2))

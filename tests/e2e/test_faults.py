"""Killed runners, killed schedulers, clients that fall silent."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import ray

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs
from rayfin.actors.messages import Ended, EngineRequest, Sampling, StopRules
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.scheduler.actor import EngineStart, SchedulerActor
from rayfin.deployments.serve.preflight import model_path

LENGTH = 400
GREEDY = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
SAMPLED = {"temperature": 1, "seed": 11, "max_tokens": LENGTH, "ignore_eos": True}
PROMPTS = [
    ("The capital of France is", GREEDY),
    ("Count from one to twenty:", GREEDY),
    ("What is 12 + 30? " * 8, GREEDY),
    ("Tell me a story.", SAMPLED),
]


def kill_runners(app: Any) -> None:
    for runner in ray.get(app.scheduler().runners.remote()):
        os.kill(runner.pid, signal.SIGKILL)


def test_killed_runner_costs_no_token(app: Any, solo: LLM) -> None:
    """The engine replays from its token log on a new runner: streams pause and go on, exact."""
    before = app.idle()
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    reasons: dict[int, str] = {}

    async def read(http: httpx.AsyncClient, index: int) -> None:
        prompt, settings = PROMPTS[index]
        body = {"prompt": prompt, "return_token_ids": True, **settings}
        async for event in app.stream(http, body):
            choice = event["choices"][0]
            tokens[index] += choice["token_ids"]
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]

    async def read_while_killing() -> None:
        async with app.async_client() as http:
            readers = asyncio.gather(*(read(http, index) for index in range(len(PROMPTS))))
            for had in (10, 60):
                while not all(len(own) > had for own in tokens):
                    assert not readers.done()
                    await asyncio.sleep(0.01)
                epoch = app.stats().epoch
                kill_runners(app)
                while app.stats().epoch == epoch:
                    await asyncio.sleep(0.05)
                assert not reasons, "the streams had ended before the kill"
            await readers

    asyncio.run(read_while_killing())
    params = [SamplingParams(**settings) for _, settings in PROMPTS]
    expected = solo.generate([prompt for prompt, _ in PROMPTS], params, use_tqdm=False)
    for index, output in enumerate(expected):
        assert tokens[index] == output.outputs[0].token_ids, PROMPTS[index]
    assert reasons == dict.fromkeys(range(len(PROMPTS)), "length")
    after = app.idle()
    assert after.epoch == before.epoch + 2
    assert after.finished["length"] - before.finished.get("length", 0) == len(PROMPTS)
    assert after.generation_tokens - before.generation_tokens == LENGTH * len(PROMPTS)


def test_killed_scheduler_costs_no_token(
    app: Any, greedy: Callable[[str, int], list[int]], eventually: Callable[..., Any]
) -> None:
    """Open requests wait for the next engine and go on there, exact."""
    app.idle()
    cpus = ray.available_resources()["CPU"]
    old = app.scheduler()
    length = 1500
    settings = {"max_tokens": length, "ignore_eos": True, "temperature": 0}
    body = {"model": app.model, "prompt": "Hello", "return_token_ids": True, **settings}
    events: list[dict[str, Any]] = []

    def token_ids() -> list[int]:
        return [token for event in events for token in event["choices"][0]["token_ids"]]

    async def stream(http: httpx.AsyncClient) -> None:
        async for event in app.stream(http, body):
            events.append(event)

    async def ask_while_killing() -> httpx.Response:
        async with app.async_client() as http:
            streamed = asyncio.create_task(stream(http))
            whole = asyncio.create_task(http.post("/v1/completions", json=body))
            while len(token_ids()) < length // 4 or app.stats().running < 2:
                assert not streamed.done(), "it is over too soon"
                await asyncio.sleep(0.02)
            ray.kill(old)
            await streamed
            return await whole

    whole = asyncio.run(ask_while_killing())
    assert [event for event in events if "error" in event] == []
    assert whole.status_code == 200, whole.text
    expected = greedy("Hello", length)
    assert token_ids() == whole.json()["choices"][0]["token_ids"] == expected
    assert whole.json()["usage"]["completion_tokens"] == length
    assert app.scheduler() != old
    stats = app.stats()
    assert stats.prefix_hits > 0.8 * stats.prefix_queries, "it knows what the pages hold"
    with app.client() as http:
        assert http.get("/health").status_code == 200
        assert app.samples()["rayfin_request_replays_total/lost"] >= 2
    eventually(
        lambda: ray.available_resources().get("CPU") == cpus, "the old engine's room is given back"
    )


@pytest.fixture(scope="module")
def short_lease(cluster: None, settings: dict[str, Any]) -> Iterator[Any]:
    """A scheduler that runs one request at a time and forgets a client after two seconds."""
    scheduler: Any = SchedulerActor.remote("short-lease", 2.0)  # type: ignore[attr-defined]
    args = EngineArgs(**{**settings, "model": model_path(settings["model"])}, max_decoding_batch=1)
    ray.get(scheduler.start.remote(EngineStart(args)))
    yield scheduler
    ray.kill(scheduler)


def request(client: str, key: int, max_tokens: int) -> EngineRequest:
    prompt = np.array([5, 6, 7], np.int32)
    return EngineRequest(
        f"{client}-{key}", prompt, Sampling(), StopRules(max_tokens), client=client, key=key
    )


def subscribe(scheduler: Any, client: str) -> Any:
    group = ray.get(scheduler.attach.remote(client)).group
    options = {"num_returns": "streaming", "concurrency_group": group}
    return scheduler.subscribe.options(**options).remote(client)


def read_to_end(stream: Any) -> tuple[int, Ended]:
    """The tokens of the one request that a client has, and its end; however many messages."""
    tokens = 0
    for ref in stream:
        message = ray.get(ref)
        tokens += len(message.tokens)
        if message.ended:
            return tokens, message.ended[0]
    raise AssertionError(f"the subscription ended after {tokens} tokens")


def test_silent_client_loses_its_requests_and_nobody_elses(short_lease: Any) -> None:
    """What waits behind a client that has gone runs once its lease is over."""
    stop = threading.Event()

    def keep_alive() -> None:
        while not stop.wait(0.2):
            short_lease.submit.remote("alive", [], [])

    short_lease.submit.remote("gone", [request("gone", key, 1800) for key in range(200)], [])
    stream = subscribe(short_lease, "alive")
    short_lease.submit.remote("alive", [request("alive", 0, 20)], [])
    renewing = threading.Thread(target=keep_alive)
    renewing.start()
    try:
        tokens, ended = read_to_end(stream)
    finally:
        stop.set()
        renewing.join()
    assert (tokens, ended.finish_reason, ended.error) == (20, "length", None)
    stats: EngineStats = ray.get(short_lease.stats.remote())
    assert stats.finished["abort"] + stats.finished["length"] == 201
    assert stats.finished["abort"] > 150
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    ray.get(short_lease.check_integrity.remote())


def test_lease_ends_the_subscription_and_a_client_may_come_back(short_lease: Any) -> None:
    assert list(subscribe(short_lease, "quiet")) == []  # it ended by itself
    short_lease.submit.remote("quiet", [request("quiet", 1, 3)], [])
    stream = subscribe(short_lease, "quiet")
    keys: list[int] = []
    while len(keys) < 3:  # a lease brings several tokens in one message
        keys += ray.get(next(stream)).keys.tolist()
    assert keys == [1, 1, 1]
    short_lease.unsubscribe.remote("quiet")
    assert list(stream) == []


def test_requests_of_a_client_that_leaves_are_aborted(short_lease: Any) -> None:
    before: EngineStats = ray.get(short_lease.stats.remote())
    short_lease.submit.remote("leaver", [request("leaver", key, 1800) for key in range(3)], [])
    ray.get(short_lease.unsubscribe.remote("leaver"))
    short_lease.submit.remote("next", [request("next", 0, 2)], [])
    stream = subscribe(short_lease, "next")
    tokens, ended = read_to_end(stream)
    assert (tokens, ended.finish_reason) == (2, "length")
    stats: EngineStats = ray.get(short_lease.stats.remote())
    grown = {reason: n - before.finished.get(reason, 0) for reason, n in stats.finished.items()}
    assert grown == {"abort": 3, "length": 1}

"""What an ingress counts of its streams, and how the counts are rendered."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta
from rayfin.actors.metrics.engine_stats import FINISH_REASONS, EngineStats
from rayfin.deployments.client.metered import MeteredEngineClient
from rayfin.deployments.client.pool import PoolEvents
from rayfin.deployments.telemetry.ingress_counters import IngressCounters

pytestmark = pytest.mark.anyio
REQUEST = EngineRequest("r", np.array([1], np.int32), Sampling(), StopRules(9))
COUNTS = {
    "ttft": "rayfin_time_to_first_token_seconds_count",
    "between": "rayfin_inter_token_latency_seconds_count",
    "whole": "rayfin_e2e_request_latency_seconds_count",
    "left": "rayfin_client_disconnects_total",
}


class FakeClient:
    """Streams ``deltas``, then waits for ever unless the last one ends the request."""

    def __init__(self) -> None:
        self.deltas = [TokenDelta("r", [1]), TokenDelta("r", [2]), TokenDelta("r", [3], "length")]
        self.current: EngineStats | None = EngineStats(incarnation="one")
        self.closed = 0
        self.events = PoolEvents()

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        with self.events.observing(request) as observe:
            try:
                for delta in self.deltas:
                    observe(delta)
                    yield delta
                if delta.finish_reason is None:
                    await asyncio.Event().wait()
            finally:
                self.closed += 1

    async def stats(self) -> dict[str, EngineStats]:
        return {} if self.current is None else {"0": self.current}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeClient:
    return FakeClient()


@pytest.fixture
def observed(engine: FakeClient) -> MeteredEngineClient:
    client: Any = engine
    return MeteredEngineClient(client, IngressCounters(), 'the "model"')


async def samples(observed: MeteredEngineClient) -> dict[str, float]:
    text = (await observed.metrics()).decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.name.startswith("rayfin_")
            assert sample.labels["model_name"] == 'the "model"'
            reason = sample.labels.get("finished_reason")
            if "le" not in sample.labels:
                found[sample.name + (f"/{reason}" if reason else "")] = sample.value
    return found


async def counts(observed: MeteredEngineClient) -> dict[str, float]:
    found = await samples(observed)
    return {short: found[name] for short, name in COUNTS.items() if found[name]}


async def test_finished_stream(observed: MeteredEngineClient, engine: FakeClient) -> None:
    assert [delta.tokens for delta in [d async for d in observed.stream(REQUEST)]] == [
        [1],
        [2],
        [3],
    ]
    assert await counts(observed) == {"ttft": 1, "between": 2, "whole": 1}
    assert engine.closed == 1


async def test_stop_string_is_an_end(observed: MeteredEngineClient, engine: FakeClient) -> None:
    """The text layer closes the stream: that is no client who has left."""
    deltas = observed.stream(REQUEST)
    await anext(deltas)
    await deltas.aclose()
    assert await counts(observed) == {"ttft": 1, "whole": 1}
    assert engine.closed == 1


async def test_client_that_leaves(observed: MeteredEngineClient, engine: FakeClient) -> None:
    engine.deltas = engine.deltas[:2]
    got: list[TokenDelta] = []

    async def read() -> None:
        async for delta in observed.stream(REQUEST):
            got.append(delta)

    reading = asyncio.create_task(read())
    while len(got) < 2:
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    assert await counts(observed) == {"ttft": 1, "between": 1, "left": 1}
    assert engine.closed == 1


async def test_failure_is_neither(observed: MeteredEngineClient, engine: FakeClient) -> None:
    class Failing(FakeClient):
        async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
            with self.events.observing(request) as observe:
                observe(delta := TokenDelta("r", [1]))
                yield delta
                raise EngineUnavailable("gone")

    failing: Any = Failing()
    observed = MeteredEngineClient(failing, IngressCounters(), 'the "model"')
    with pytest.raises(EngineUnavailable):
        async for _ in observed.stream(REQUEST):
            pass
    assert await counts(observed) == {"ttft": 1}


async def test_engine_numbers(observed: MeteredEngineClient, engine: FakeClient) -> None:
    engine.current = EngineStats(
        incarnation="one",
        epoch=2,
        steps=9,
        running=3,
        waiting=4,
        pages_total=10,
        pages_held=5,
        host_pages_total=8,
        host_pages_held=2,
        preemptions=3,
        preemptions_by_swap=2,
        requeued_by_restart=5,
        swapped_out=20,
        swapped_in=16,
        prompt_tokens=70,
        generation_tokens=80,
        finished={"stop": 6, "abort": 2},
    )
    expected = {
        "engine_epoch": 2,
        "engine_steps_total": 9,
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "kv_cache_pages": 10,
        "kv_cache_usage_perc": 0.5,
        "num_preemptions_total": 3,
        "num_preemptions_by_swap_total": 2,
        "num_requests_requeued_total": 5,
        "swapped_out_pages_total": 20,
        "swapped_in_pages_total": 16,
        "swap_usage_perc": 0.25,
        "prompt_tokens_total": 70,
        "generation_tokens_total": 80,
        "request_success_total/stop": 6,
        "request_success_total/length": 0,
        "request_success_total/abort": 2,
        "request_success_total/error": 0,
        "request_success_total/repetition": 0,
    }
    assert {reason for name in expected if (reason := name.partition("/")[2])} == {*FINISH_REASONS}
    for current in (engine.current, None):  # the last known numbers stand while it is away
        engine.current = current
        found = await samples(observed)
        assert {name: found[f"rayfin_{name}"] for name in expected} == expected


async def test_every_engine_has_its_own(observed: MeteredEngineClient, engine: FakeClient) -> None:
    numbers = {
        "0": EngineStats(running=3, incarnation="a"),
        "1": EngineStats(running=4, incarnation="b"),
    }

    async def stats() -> dict[str, EngineStats]:
        return numbers

    engine.stats = stats  # type: ignore[method-assign]
    for known in (2, 1):  # one of them is away: its last numbers stand
        numbers = dict(list(numbers.items())[:known])
        text = (await observed.metrics()).decode()
        lines = [line for line in text.splitlines() if line.startswith("rayfin_num_requests_run")]
        assert [('engine="0"' in line, line[-3:]) for line in lines] == [
            (True, "3.0"),
            (False, "4.0"),
        ]


async def test_replays_are_counted(observed: MeteredEngineClient, engine: FakeClient) -> None:
    client: Any = engine
    client.events.replayed("lost")
    client.events.replayed("moved")
    client.events.replayed("lost")
    text = (await observed.metrics()).decode()
    lines = [line for line in text.splitlines() if line.startswith("rayfin_request_replays_total")]
    assert sorted(line[-3:] for line in lines) == ["1.0", "2.0"]

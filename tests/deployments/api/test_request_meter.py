"""What the outermost layer counts: each answer once, and the first event of each stream."""

import itertools
import time
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import EngineUnavailable
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.telemetry.ingress_counters import HANDLERS, STATUSES

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 5}


def answers(service: OpenAIService) -> dict[tuple[str, str], int]:
    return {labels: count for labels, count in service.counts.answers.items() if count}


async def test_each_answer_is_counted_once(
    http: httpx.AsyncClient, service: OpenAIService, engine: Any
) -> None:
    for _ in range(2):
        assert (await http.post(PATH, json=BODY)).status_code == 200
    assert (await http.post(PATH, json={"prompt": 7.5})).status_code == 400
    assert (await http.get("/<script>")).status_code == 404
    assert (await http.get("/health")).status_code == 200
    engine.refusal = EngineUnavailable("gone")
    assert (await http.post(PATH, json=BODY)).status_code == 503
    assert answers(service) == {
        (PATH, "2xx"): 2,
        (PATH, "4xx"): 1,
        (PATH, "5xx"): 1,
        ("other", "2xx"): 1,
        ("other", "4xx"): 1,
    }
    # A path that a client makes up makes no series.
    assert set(service.counts.answers) <= set(itertools.product(HANDLERS, STATUSES))


async def test_the_first_event_of_a_stream(http: httpx.AsyncClient, service: OpenAIService) -> None:
    await http.post(PATH, json=BODY)
    assert service.counts.first_flush.count == 0
    for number in (1, 2):
        await http.post(PATH, json={**BODY, "stream": True})
        assert service.counts.first_flush.count == number


async def test_an_arrival_is_that_of_the_http_request(http: httpx.AsyncClient, engine: Any) -> None:
    before = time.monotonic()
    await http.post(PATH, json={**BODY, "n": 2})
    after = time.monotonic()
    first, second = engine.seen
    assert before <= first.arrival == second.arrival <= after

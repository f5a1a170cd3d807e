"""Every request and token is counted once, whatever dies meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import ray
from ray.util import list_named_actors

from rayfin.actors.processes.registry import NAMESPACE

R, P, T = 5, 21, 9  # requests, one after the other; tokens of each prompt and each output


def hubs(app: Any) -> list[Any]:
    prefix = f"{app.name}/metrics/"
    named = list_named_actors(all_namespaces=True)
    names = [own["name"] for own in named if own["name"].startswith(prefix)]
    return [ray.get_actor(name, namespace=NAMESPACE) for name in names]


def growth(app: Any, before: dict[str, float]) -> dict[str, float]:
    after = app.samples()
    return {
        name.removeprefix("rayfin_"): value - before.get(name, 0) for name, value in after.items()
    }


@pytest.mark.parametrize("stream", [False, True])
def test_acceptance_numbers(app: Any, http: httpx.Client, stream: bool) -> None:
    """A step's tokens are the prompt tokens that it computed and those that it sampled.

    A draft that holds saves a step; whether there is one depends on how long steps take.
    """
    app.idle()
    before = app.samples()
    for number in range(R):
        prompt = [40 + number + 10 * stream, *range(60, 59 + P)]  # no page of another's
        body = {"prompt": prompt, "max_tokens": T, "ignore_eos": True, "stream": stream}
        http.post("/v1/completions", json=body).raise_for_status()
    app.idle()
    grown = growth(app, before)
    assert grown["prompt_tokens_total"] == R * P and grown["generation_tokens_total"] == R * T
    assert grown["iteration_tokens_total_sum"] == R * (P + T)
    steps = R * T - grown["spec_decode_num_accepted_tokens_total"]
    assert grown["iteration_tokens_total_count"] == grown["engine_steps_total"] == steps
    assert 0 < grown["step_transport_seconds_count"] <= steps  # leases are several steps
    assert grown["inter_token_latency_seconds_count"] == R * (T - 1)
    assert grown["first_flush_seconds_count"] == R * stream
    assert grown["request_success_total/length"] == R
    phases = ("queue", "prefill", "decode", "inference")
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "ingress_time_seconds",
        "request_transport_seconds",
        *(f"request_{phase}_time_seconds" for phase in phases),
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "request_max_num_generation_tokens",
        "request_prefill_kv_computed_tokens",
        "request_num_preemptions",
    ):
        assert grown[f"{name}_count"] == R, name
    tokens = {"request_prompt_tokens": P, "request_prefill_kv_computed_tokens": P}
    tokens |= {"request_generation_tokens": T, "request_max_num_generation_tokens": T}
    assert {name: grown[f"{name}_sum"] for name in tokens} == {
        name: R * each for name, each in tokens.items()
    }
    engine = sum(grown[f"request_{phase}_time_seconds_sum"] for phase in phases[:3])
    assert engine <= grown["e2e_request_latency_seconds_sum"]
    first = sum(grown[f"request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill"))
    transport = grown["request_transport_seconds_sum"]
    assert 0 < transport and first + transport <= grown["time_to_first_token_seconds_sum"]
    zeros = ("client_disconnects_total", "num_preemptions_total", "engine_restarts_total")
    assert [grown[name] for name in zeros] == [0, 0, 0]


def test_choices_belong_to_one_prompt(app: Any, http: httpx.Client) -> None:
    app.idle()
    before = app.samples()
    body = {"prompt": "Hello", "n": 3, "max_tokens": 4, "ignore_eos": True}
    http.post("/v1/completions", json=body).raise_for_status()
    app.idle()
    grown = growth(app, before)
    assert grown["request_params_n_count"] == grown["request_max_num_generation_tokens_count"] == 1
    assert grown["request_params_n_sum"] == 3
    assert grown["request_generation_tokens_count"] == 3


def test_after_aborts_nothing_runs_or_waits(app: Any, eventually: Callable[..., Any]) -> None:
    before = app.idle()
    body = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True}

    async def leave() -> None:
        async with app.async_client() as http:
            streams = [app.stream(http, body) for _ in range(4)]
            for events in streams:
                await anext(events)
            for events in streams:
                await events.aclose()

    asyncio.run(leave())
    after = app.idle()
    assert after.finished["abort"] - before.finished.get("abort", 0) == 4
    found = app.samples()
    names = ("num_requests_running", "num_requests_waiting", "http_requests_in_flight")
    eventually(lambda: [app.samples()[f"rayfin_{name}"] for name in names] == [0, 0, 0], "all left")
    assert found["rayfin_kv_cache_usage_perc"] == 0


def test_a_dead_hub_costs_no_request_and_comes_back(
    app: Any, http: httpx.Client, eventually: Callable[..., Any]
) -> None:
    eventually(lambda: len(hubs(app)) == 1, "there is a hub")
    (hub,) = hubs(app)
    before = app.samples()
    ray.kill(hub)
    for _ in range(3):
        body = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        http.post("/v1/completions", json=body).raise_for_status()
        grown = growth(app, before)
        assert not [name for name, value in grown.items() if name.endswith("_total") and value < 0]
    eventually(lambda: any(own != hub for own in hubs(app)), "there is another hub")
    app.idle()
    grown = growth(app, before)
    assert grown["generation_tokens_total"] == 3 * 5
    assert grown["time_to_first_token_seconds_count"] == 3
    assert grown["engine_restarts_total"] == 0

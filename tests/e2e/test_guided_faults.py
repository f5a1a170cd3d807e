"""Guided requests through Ray: grammars compiled ahead, runners that die amid their streams."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import ray

from rayfin import LLM, SamplingParams
from rayfin.actors.metrics.engine_stats import EngineStats

LENGTH = 300


def form(name: str) -> dict[str, Any]:
    """A schema that no other test asks for, whose answers have an end."""
    item = {
        "type": "object",
        "properties": {
            name: {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": [name, "n"],
        "additionalProperties": False,
    }
    return {
        "json": {"type": "array", "items": item, "minItems": 4, "maxItems": 6},
        "disable_any_whitespace": True,
    }


def asked(name: str, seed: int) -> dict[str, Any]:
    return {
        "prompt": f"The list of {name}:",
        "max_tokens": LENGTH,
        "temperature": 1,
        "seed": seed,
        "structured_outputs": form(name),
        "return_token_ids": True,
    }


def expected(solo: LLM, body: dict[str, Any]) -> tuple[list[int], str | None]:
    names = ("max_tokens", "temperature", "seed", "structured_outputs")
    params = SamplingParams(**{name: body[name] for name in names})
    (output,) = solo.generate([body["prompt"]], params, use_tqdm=False)
    return output.outputs[0].token_ids, output.outputs[0].finish_reason


def grown(before: EngineStats, after: EngineStats, name: str) -> int:
    return after.histograms[name].count - before.histograms[name].count


def test_an_unseen_grammar_is_compiled_before_its_first_token(app: Any, solo: LLM) -> None:
    """A quick one beside its first forward, any other before its request runs."""
    for known in (False, True):
        before = app.idle()
        body = asked("fruits", 7)
        with app.client() as http:
            (choice,) = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        after = app.idle()
        assert (choice["token_ids"], choice["finish_reason"]) == expected(solo, body)
        assert 4 <= len(json.loads(choice["text"])) <= 6
        assert grown(before, after, "grammar_wait_seconds") <= (not known)
        assert grown(before, after, "grammar_compile_seconds") == (not known)
        assert grown(before, after, "grammar_mask_seconds") > 0
        hits = after.grammar_hits - before.grammar_hits
        assert hits >= known and hits + after.grammar_misses - before.grammar_misses == 1


def test_killed_runners_cost_no_token_of_a_guided_stream(
    app: Any, solo: LLM, eventually: Callable[..., Any]
) -> None:
    """Also those that are killed while grammars compile."""
    before = app.idle()
    bodies = [asked(f"things {number}", number) for number in range(6)]
    tokens: list[list[int]] = [[] for _ in bodies]
    reasons: list[str | None] = [None for _ in bodies]

    async def read(http: httpx.AsyncClient, index: int) -> None:
        async for event in app.stream(http, bodies[index]):
            choice = event["choices"][0]
            tokens[index] += choice["token_ids"]
            reasons[index] = choice["finish_reason"] or reasons[index]

    def kill() -> None:
        for runner in ray.get(app.scheduler().runners.remote()):
            os.kill(runner.pid, signal.SIGKILL)

    async def read_while_killing() -> None:
        async with app.async_client() as http:
            first = [asyncio.create_task(read(http, index)) for index in range(3)]
            while not all(len(own) > 5 for own in tokens[:3]):
                await asyncio.sleep(0.01)
            later = [asyncio.create_task(read(http, index)) for index in range(3, 6)]
            kill()
            await asyncio.gather(*first, *later)

    asyncio.run(read_while_killing())
    for index, body in enumerate(bodies):
        assert (tokens[index], reasons[index]) == expected(solo, body), body
    after = app.idle()
    assert after.epoch > before.epoch
    assert not after.failed

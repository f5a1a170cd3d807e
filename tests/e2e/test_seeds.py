"""A request with a seed has one answer: alone, in a crowd, streamed, in another process."""

import asyncio
from typing import Any

import httpx
import pytest

from rayfin import LLM, SamplingParams

PROMPT = "What is the capital of France? And of the United States?"
LENGTH = 24
SETTINGS: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95, "seed": 7, "n": 2}
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": LENGTH,
    "ignore_eos": True,
    "return_token_ids": True,
    **SETTINGS,
}
CROWD = 12  # others, each with another prompt, length and seed or none

Answer = dict[int, tuple[str, list[int]]]  # choice -> text, tokens


def alone(app: Any) -> Answer:
    with app.client() as http:
        choices = http.post("/v1/completions", json=BODY).raise_for_status().json()["choices"]
    return {choice["index"]: (choice["text"], choice["token_ids"]) for choice in choices}


async def streamed(app: Any, http: httpx.AsyncClient) -> Answer:
    answer: Answer = {0: ("", []), 1: ("", [])}
    async for event in app.stream(http, BODY):
        for choice in event["choices"]:
            text, tokens = answer[choice["index"]]
            answer[choice["index"]] = (text + choice["text"], tokens + choice["token_ids"])
    return answer


async def in_a_crowd(app: Any) -> list[Answer]:
    async with app.async_client() as http:
        others = [
            http.post(
                "/v1/completions",
                json={"prompt": f"{i} " * (3 * i + 1), "max_tokens": 10 + 5 * i, "ignore_eos": True}
                | ({"seed": 7} if i % 2 else {}),
            )
            for i in range(CROWD)
        ]
        mine = [streamed(app, http) for _ in range(3)]
        answers = await asyncio.gather(*others[::2], *mine, *others[1::2])
    return [answer for answer in answers if isinstance(answer, dict)]


@pytest.fixture(scope="module")
def expected(solo: LLM) -> Answer:
    """What another process makes of it: nothing is drawn but from the seed and the position."""
    params = SamplingParams(**SETTINGS, max_tokens=LENGTH, ignore_eos=True)
    outputs = solo.generate(PROMPT, params, use_tqdm=False)[0].outputs
    return {output.index: (output.text, output.token_ids) for output in outputs}


def test_alone_and_again(app: Any, expected: Answer) -> None:
    assert expected[0] != expected[1]
    assert alone(app) == alone(app) == expected


def test_in_a_crowd(app: Any, expected: Answer) -> None:
    answers = asyncio.run(in_a_crowd(app))
    assert len(answers) == 3 and all(answer == expected for answer in answers)

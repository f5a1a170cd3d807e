"""Ways to a model beside HTTP and ``LLM``: ``AsyncLLM`` in a process, and ``rayfin.connect``.

    python benchmarks/ray_home.py all-at-once    # 64 prompts at once, beside LLM.generate
    python benchmarks/ray_home.py connected      # streams of a served model, beside HTTP

The two sides take turns; figures are medians of the rounds.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import httpx
import ray
from ray import serve
from sections import run

from rayfin import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams, connect
from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs

SETTINGS: dict[str, Any] = {"threads": 1, "kv_cache_memory": 128 * 2**20}
PORT = 18_234
Stream = Callable[[int], AsyncIterator[int]]  # the tokens of each event of a request


def prompts(count: int) -> list[str]:
    return [f"What is {number} + {number * 7 % 50}?" for number in range(count)]


def all_at_once() -> None:
    """Whole outputs: tokens a second of ``LLM.generate`` and of as many coroutines."""
    arguments = read_arguments()
    whole = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    final = whole.clone()
    final.output_kind = RequestOutputKind.FINAL_ONLY
    rates: dict[str, list[float]] = {"LLM": [], "AsyncLLM": []}
    texts = prompts(arguments.prompts)

    async def one(llm: AsyncLLM, prompt: str) -> Any:
        return [output async for output in llm.generate(prompt, final)][0]

    async def measure() -> None:
        args = AsyncEngineArgs("demo", **SETTINGS)
        with LLM("demo", **SETTINGS) as solo:
            async with AsyncLLM.from_engine_args(args) as llm:
                for number in range(arguments.rounds + 1):
                    began = time.perf_counter()
                    expected = solo.generate(texts, whole, use_tqdm=False)
                    between = time.perf_counter()
                    outputs = await asyncio.gather(*(one(llm, text) for text in texts))
                    ended = time.perf_counter()
                    for output, other in zip(outputs, expected, strict=True):
                        assert output.outputs[0].token_ids == other.outputs[0].token_ids
                    count = len(texts) * arguments.tokens
                    if number:  # the first round warms up
                        rates["LLM"].append(count / (between - began))
                        rates["AsyncLLM"].append(count / (ended - between))

    asyncio.run(measure())
    middle = {name: statistics.median(values) for name, values in rates.items()}
    for name, value in middle.items():
        print(f"{name:9} {value:9,.0f} tokens/s")
    print(f"ratio     {middle['AsyncLLM'] / middle['LLM']:9.3f}")


async def timed(stream: AsyncIterator[int]) -> tuple[float, int]:
    """Seconds to the first token, and all tokens."""
    began, first, count = time.perf_counter(), 0.0, 0
    async for tokens in stream:
        if tokens and not count:
            first = time.perf_counter() - began
        count += tokens
    return first, count


async def side_by_side(stream: Stream, count: int) -> tuple[float, float]:
    """The median time to the first token in seconds, and tokens a second, of so many streams."""
    began = time.perf_counter()
    ended = await asyncio.gather(*(timed(stream(number)) for number in range(count)))
    seconds = time.perf_counter() - began
    firsts = [first for first, _ in ended]
    return statistics.median(firsts), sum(tokens for _, tokens in ended) / seconds


def connected() -> None:
    """Streams of a served model, by HTTP and by ``connect``."""
    arguments = read_arguments()
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(bind_app(ServerArgs(), EngineArgs(**SETTINGS)), name="rayfin")
    texts = prompts(64)

    async def measure() -> None:
        limits = httpx.Limits(max_connections=None)
        url = f"http://127.0.0.1:{PORT}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http,
            await connect("rayfin") as client,
        ):
            params = SamplingParams(
                temperature=0,
                max_tokens=arguments.tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )

            async def by_http(number: int) -> AsyncIterator[int]:
                body = {"prompt": texts[number], "temperature": 0, "stream": True}
                body |= {"max_tokens": arguments.tokens, "ignore_eos": True}
                body["return_token_ids"] = True
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            choice = json.loads(line.removeprefix("data: "))["choices"][0]
                            yield len(choice["token_ids"] or ())

            async def by_actors(number: int) -> AsyncIterator[int]:
                async with aclosing(client.generate(texts[number], params)) as outputs:
                    async for output in outputs:
                        yield len(output.outputs[0].token_ids)

            ways: dict[str, Stream] = {"HTTP": by_http, "connect": by_actors}
            for count in (1, 16):
                await report(ways, count, arguments.rounds)

    asyncio.run(measure())
    serve.shutdown()
    ray.shutdown()


async def report(ways: dict[str, Stream], count: int, rounds: int) -> None:
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, stream in ways.items():
            figures = await side_by_side(stream, count)
            if number:
                measured[name].append(figures)
    for name, figures in measured.items():
        first, rate = (statistics.median(each) for each in zip(*figures, strict=True))
        print(
            f"{count:3} streams, {name:8} first token {first * 1000:7.2f} ms, {rate:8,.0f} tokens/s"
        )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=64, help="at most 64 with connect")
    return parser.parse_args()


if __name__ == "__main__":
    run(__doc__, all_at_once, connected)

"""Ways to a model beside HTTP and ``LLM``: ``AsyncLLM`` in a process, and ``rayfin.connect``.

    python benchmarks/ray_home.py all-at-once    # 64 prompts at once, beside LLM.generate
    python benchmarks/ray_home.py connected      # streams of a served model, beside HTTP
    python benchmarks/ray_home.py app            # an application of rayfin.llm, beside rayfin serve
    python benchmarks/ray_home.py broken         # a model's start, beside others
    python benchmarks/ray_home.py buckets        # reading a bucket of local files, beside cp

The two sides take turns; figures are medians of the rounds.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from sections import run

from rayfin import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams, connect
from rayfin.actors.buckets.folder import CACHE, bucket_folder
from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.llm import build_openai_app

SETTINGS: dict[str, Any] = {"threads": 1, "kv_cache_memory": 128 * 2**20}
PORT = 18_234
STREAMS = 16  # of a round
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


@dataclass(slots=True)
class Timed:
    """One stream: seconds to its first token, those between two events, and its tokens."""

    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0


async def timed(stream: AsyncIterator[int]) -> Timed:
    times, before = Timed(), time.perf_counter()
    async for tokens in stream:
        now = time.perf_counter()
        if tokens and not times.tokens:
            times.first = now - before
        elif tokens:
            times.gaps.append(now - before)
        before = now if tokens else before
        times.tokens += tokens
    return times


async def side_by_side(stream: Stream, count: int) -> tuple[float, float, float]:
    """Of 16 streams, ``count`` at a time: the median time to the first token and the 99th
    percentile of gaps, in seconds, and tokens a second."""
    began, ended = time.perf_counter(), []
    for first in range(0, STREAMS, count):
        numbers = range(first, first + count)
        ended += await asyncio.gather(*(timed(stream(number)) for number in numbers))
    seconds = time.perf_counter() - began
    gaps = sorted(gap for times in ended for gap in times.gaps)
    begun = statistics.median(times.first for times in ended)
    return begun, gaps[len(gaps) * 99 // 100], sum(times.tokens for times in ended) / seconds


def by_http(http: httpx.AsyncClient, path: str, tokens: int) -> Stream:
    """Streams of completions at an address."""

    async def stream(number: int) -> AsyncIterator[int]:
        body = {"prompt": prompts(64)[number], "temperature": 0, "stream": True}
        body |= {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
        async with http.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    yield len(choice["token_ids"] or ())

    return stream


def by_actors(client: AsyncLLM, tokens: int) -> Stream:
    """Streams of a client that is connected."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    params.output_kind = RequestOutputKind.DELTA

    async def stream(number: int) -> AsyncIterator[int]:
        async with aclosing(client.generate(prompts(64)[number], params)) as outputs:
            async for output in outputs:
                yield len(output.outputs[0].token_ids)

    return stream


def connected() -> None:
    """Streams of a served model, by HTTP and by ``connect``."""
    arguments = read_arguments()
    start()

    async def measure() -> None:
        async with client() as http, await connect("rayfin") as program:
            plain = by_http(http, "/v1/completions", arguments.tokens)
            await report(
                {"HTTP": plain, "connect": by_actors(program, arguments.tokens)}, arguments.rounds
            )

    asyncio.run(measure())
    stop()


def app() -> None:
    """Streams of an application of ``rayfin.llm``, and of ``rayfin serve``'s beside it."""
    arguments = read_arguments()
    start()
    model = {"model_loading_config": {"model_id": "demo"}, "engine_kwargs": SETTINGS}
    serve.run(build_openai_app({"llm_configs": [model]}), name="ray", route_prefix="/ray")

    async def measure() -> None:
        async with client() as http:
            ways = {
                name: by_http(http, f"{prefix}/v1/completions", arguments.tokens)
                for name, prefix in (("serve", ""), ("llm", "/ray"))
            }
            await report(ways, arguments.rounds)

    asyncio.run(measure())
    stop()


def broken() -> None:
    """Seconds until a model answers: alone, beside another one, and beside one that cannot load."""
    arguments = read_arguments()
    start(serving=False)
    model = {"model_loading_config": {"model_id": "demo"}, "engine_kwargs": SETTINGS}
    loading = {"model_id": "other", "model_source": "demo"}
    good = {"model_loading_config": loading, "engine_kwargs": SETTINGS}
    bad = {"model_loading_config": loading, "engine_kwargs": {**SETTINGS, "kv_cache_memory": 1}}
    ways = {"alone": [model], "beside a good one": [model, good], "beside a broken": [model, bad]}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, models in ways.items():
            began = time.perf_counter()
            target = serve.RunTarget(build_openai_app({"llm_configs": models}), name="ray")
            serve.run_many([target], wait_for_applications_running=False)
            body = {"model": "demo", "prompt": "a", "max_tokens": 1}
            url = f"http://127.0.0.1:{PORT}/v1/completions"
            while httpx.post(url, json=body, timeout=600).status_code != 200:
                time.sleep(0.05)
            seconds[name].append(time.perf_counter() - began)
            serve.delete("ray")
    for name, values in seconds.items():
        print(f"{name:18} {statistics.median(values):6.1f} s until the model answers")
    stop()


def buckets() -> None:
    """MB/s of a file of 512 MiB, until it is on the disk."""
    rates: dict[str, list[float]] = {"cp": [], "bucket": []}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        source = Path(folder, "source")
        source.mkdir()
        (source / "config.json").write_text("{}")
        weights = source / "model.safetensors"
        weights.write_bytes(random.Random(1).randbytes(2**20) * 512)
        os.environ[CACHE] = str(Path(folder, "cache"))
        for number in range(read_arguments().rounds + 1):
            began = time.perf_counter()
            copied = Path(folder, "copied")
            subprocess.run(["cp", weights, copied], check=True)
            subprocess.run(["sync", copied], check=True)
            between = time.perf_counter()
            kept = bucket_folder(f"file://{source}")
            ended = time.perf_counter()
            if number:  # the first round warms up
                rates["cp"].append(512 / (between - began))
                rates["bucket"].append(512 / (ended - between))
            copied.unlink()
            shutil.rmtree(kept)
    for name, values in rates.items():
        print(f"{name:7} {statistics.median(values):7,.0f} MiB/s")
    print(f"ratio   {statistics.median(rates['bucket']) / statistics.median(rates['cp']):7.2f}")


def start(*, serving: bool = True) -> None:
    """Starts Ray, and the application that ``rayfin serve`` would, if any."""
    # Two applications on two cores: they take turns.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    if serving:
        serve.run(bind_app(ServerArgs(), EngineArgs(**SETTINGS)), name="rayfin")


def stop() -> None:
    serve.shutdown()
    ray.shutdown()


def client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=600, limits=limits)


async def report(ways: dict[str, Stream], rounds: int) -> None:
    for count in (1, STREAMS):
        measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            # The first one of a round has what the other's end left behind.
            for name, stream in list(ways.items())[:: 1 if number % 2 else -1]:
                figures = await side_by_side(stream, count)
                if number:
                    measured[name].append(figures)
        for name, rows in measured.items():
            first, gap, rate = (statistics.median(each) for each in zip(*rows, strict=True))
            shown = f"first token {first * 1000:7.2f} ms, p99 gap {gap * 1000:7.2f} ms"
            print(f"{count:3} streams, {name:8} {shown}, {rate:8,.0f} tokens/s")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=64, help="at most 64 with connect")
    return parser.parse_args()


if __name__ == "__main__":
    run(__doc__, all_at_once, connected, app, broken, buckets)

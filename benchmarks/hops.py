"""What a step costs beside the model: on its way over HTTP, to a runner actor, and on the host.

    python benchmarks/hops.py http --model MODEL [--requests 30] [--prompt-tokens 128]
    python benchmarks/hops.py channel [--calls 300]
    python benchmarks/hops.py executors [--shape demo|135m] [--rounds 5]
    python benchmarks/hops.py host [--rows 1,32,256]

http: a server gets prompts one after another, each for one output token; a row for each hop. All
but the client's are growths of the server's histograms on /metrics; mean milliseconds.
channel: a step is sent to a runner actor and back, by value or by ``ray.put``.
executors: offline throughput of one engine inline and as Ray actors, in turns.
host: processor time of the one thread of an inline `LLM`. The runner answers at once. "in parts"
reads each token as it comes, as with stop strings; "whole" reads an output at its end. The least
of several runs is printed, since other processes only add.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from sections import run
from server import served
from transformers import LlamaConfig

from rayfin import LLM, SamplingParams
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.deployments.bench.client import run_jobs
from rayfin.deployments.bench.workload import Lengths, random_jobs

PATIENCE = 60.0  # seconds until the hub has counted all requests
TTFT = "time_to_first_token_seconds"
WARM_UP = 3


def totals(metrics: str) -> dict[str, float]:
    """The values of Rayfin's series, summed over labels."""
    sums: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("rayfin_"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0].removeprefix("rayfin_")
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


async def counted(http: httpx.AsyncClient, requests: int) -> dict[str, float]:
    """Waits until the totals count this many requests, and returns them."""
    deadline = time.monotonic() + PATIENCE
    while True:
        sums = totals((await http.get("/metrics")).raise_for_status().text)
        counts = (sums.get(f"{name}_count", 0) for name in (TTFT, "request_prefill_time_seconds"))
        if min(counts) >= requests:
            return sums
        assert time.monotonic() < deadline, "the hub has not counted all requests"
        await asyncio.sleep(0.2)


async def measure(url: str, requests: int, prompt_tokens: int) -> None:
    jobs = random_jobs(
        WARM_UP + requests,
        Lengths.parse(str(prompt_tokens), "prompt_tokens"),
        Lengths.parse("1", "output_tokens"),
        vocabulary=400,
        seed=1,
    )
    async with (
        httpx.AsyncClient(base_url=url) as http,
        httpx.AsyncClient(base_url=f"{url}/v1", timeout=60) as api,
    ):
        model = (await api.get("/models")).raise_for_status().json()["data"][0]["id"]
        await run_jobs(api, model, jobs[:WARM_UP], max_concurrency=1)
        before = await counted(http, WARM_UP)
        lines = await run_jobs(api, model, jobs[WARM_UP:], max_concurrency=1)
        after = await counted(http, WARM_UP + requests)
    assert not any(line.error for line in lines), [line.error for line in lines]
    client = 1000 * sum(line.ttft or 0.0 for line in lines) / requests

    def each(name: str) -> float:
        return 1000 * (after[name] - before[name]) / requests

    flushed, first = each("first_flush_seconds_sum"), each(f"{TTFT}_sum")
    ingress, transport = each("ingress_time_seconds_sum"), each("request_transport_seconds_sum")
    queue, prefill = (each(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill"))
    step, to_runner = each("step_seconds_total"), each("step_transport_seconds_sum")
    rows = (
        ("client, proxy and Serve's router, both ways", client - flushed),
        ("ingress: checks and tokens", ingress),
        ("ingress to engine, and back", transport),
        ("engine: until admitted", queue),
        ("engine to runner, and back", to_runner),
        ("engine: the rest until the first token", prefill - step - to_runner),
        (
            "ingress: the rest until the first event is out",
            flushed - ingress - transport - queue - prefill,
        ),
        ("the step itself", step),
        ("all, as the client sees it", client),
    )
    print(f"{requests} prompts of {prompt_tokens} tokens and one more: ms, means")
    print("\n".join(f"{value:8.1f}  {name}" for name, value in rows))
    print(f"{first:8.1f}  of these, from the ingress' side, to the first token")


def http() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    options = parser.parse_args()
    with served(options.model) as url:
        asyncio.run(measure(url, options.requests, options.prompt_tokens))


ROWS = (1, 32, 256)
CHANNEL_ROUNDS = 5  # the two ways alternate, so that other load hits both


@ray.remote(max_restarts=0, num_cpus=1)
class Echo:
    """A runner without a model."""

    def execute(self, info: SchedulerInfo) -> StepResult:
        return StepResult(info.epoch, info.step, np.zeros((len(info.ids), 1), np.int32))


def decode_step(rows: int) -> SchedulerInfo:
    """A step of ``rows`` decoding requests."""
    zeros, ones = np.zeros(rows, np.int32), np.ones(rows, np.int32)
    return SchedulerInfo(
        epoch=0,
        step=0,
        ids=np.arange(rows, dtype=np.int32),
        chunk_idx=np.arange(rows, dtype=np.int32),
        chunk_len=ones,
        merge_prompt=-ones,
        kv_len=ones * 500,
        kv_page_len=ones * 32,
        last_pos=zeros,
        is_decoding=np.ones(rows, np.bool_),
        decoding_batch=rows,
        prefill_batch=0,
        new_pages=np.zeros(rows // 16, np.int32),
        new_pages_len=zeros,
    )


def seconds_per_call(send: Callable[[], Any], calls: int, depth: int) -> float:
    """Mean seconds of a call with ``depth`` of them in flight."""
    in_flight: deque[Any] = deque()
    started = time.perf_counter()
    for _ in range(calls):
        in_flight.append(send())
        if len(in_flight) == depth:
            ray.get(in_flight.popleft())
    ray.get(list(in_flight))
    return (time.perf_counter() - started) / calls


def channel() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=300)
    calls = parser.parse_args().calls
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)
    echo: Any = Echo.remote()
    ways: dict[str, Callable[[SchedulerInfo], Any]] = {
        "by value": lambda info: echo.execute.remote(info),
        "ray.put": lambda info: echo.execute.remote(ray.put(info)),
    }
    print("| rows | in flight | by value, ms | ray.put, ms | ratio |")
    print("|---|---|---|---|---|")
    for rows in ROWS:
        info = decode_step(rows)
        for depth in (1, 2):
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(CHANNEL_ROUNDS + 1):
                for name, way in ways.items():
                    times[name].append(
                        seconds_per_call(lambda way=way, info=info: way(info), calls, depth)  # type: ignore[misc]
                    )
            value, put = (1e3 * statistics.median(times[name][1:]) for name in ways)
            print(f"| {rows} | {depth} | {value:.2f} | {put:.2f} | {put / value:.1f} |")
    ray.shutdown()


EXECUTOR_REQUESTS = 64
PROMPT_TOKENS = (50, 400)
OUTPUT_TOKENS = (20, 120)


def executor_settings(shape: str, folder: Path) -> dict[str, Any]:
    """The engine arguments of both executors."""
    if shape == "demo":
        return {"model": "demo"}
    make_config: Any = LlamaConfig  # transformers leaves its constructor without types
    make_config(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True}


def executor_workload(
    vocabulary: int, *, seed: int = 0, requests: int = EXECUTOR_REQUESTS
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts that differ by seed, and greedy sampling with fixed output lengths."""
    rng, lengths = random.Random(seed), random.Random(0)
    prompts = [
        [rng.randrange(10, vocabulary) for _ in range(lengths.randint(*PROMPT_TOKENS))]
        for _ in range(requests)
    ]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=lengths.randint(*OUTPUT_TOKENS),
            ignore_eos=True,
            detokenize=False,
        )
        for _ in prompts
    ]
    return prompts, params


def compare_executors(
    shape: str, rounds: int, *, threads: int | None = None, requests: int = EXECUTOR_REQUESTS
) -> dict[str, list[float]]:
    """Returns the output tokens per second of each round, by executor.

    Both get the same prompts, which change in every round so that the prefix cache does not help.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = executor_settings(shape, Path(folder)) | {"threads": threads}
        engines = {name: LLM(executor=name, **common) for name in ("inline", "ray")}
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for round_ in range(rounds + 1):  # the first round is small and warms up
            count = requests if round_ else min(8, requests)
            prompts, params = executor_workload(2000, seed=round_, requests=count)
            tokens = sum(each.max_tokens or 0 for each in params)
            for name, llm in engines.items():
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                rates[name].append(tokens / (time.perf_counter() - started))
        for llm in engines.values():
            llm.close()
    return {name: rounds[1:] for name, rounds in rates.items()}


def executors() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=("demo", "135m"), default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    rates = compare_executors(options.shape, options.rounds, threads=options.threads)
    print(f"{options.shape}: {EXECUTOR_REQUESTS} requests, {options.rounds} rounds")
    for name, values in rates.items():
        print(f"  {name:7} {', '.join(f'{rate:.0f}' for rate in values)} tokens/s")
    inline, ray = map(statistics.median, rates.values())
    print(f"  ray / inline: {ray / inline:.3f}")


TOKENS, TOKEN = 100, 40
HOST_ROUNDS = 5


class Answered:
    """A step whose rows all sample the same token."""

    def __init__(self, info: SchedulerInfo) -> None:
        self._info = info

    def result(self) -> StepResult:
        info = self._info
        tokens = np.where(info.last_pos >= 0, TOKEN, -1).astype(np.int32)[:, None]
        return StepResult(info.epoch, info.step, tokens, seconds=1e-3)


class InstantExecutor:
    """Takes the place of an inline engine's executor, and counts steps."""

    epoch = 0

    def __init__(self) -> None:
        self.steps = 0

    def submit(self, info: SchedulerInfo) -> Answered:
        self.steps += 1
        return Answered(info)


def milliseconds(llm: LLM, rows: int, **settings: Any) -> float:
    """Of a step, on average over a run of so many requests."""
    engine: Any = llm._engine
    executor = engine._engine._pipeline._executor
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **settings)
    prompts = [[5 + row % 50, 6, 7] for row in range(rows)]
    least = float("inf")
    for _ in range(HOST_ROUNDS):
        before, started = executor.steps, time.thread_time()
        llm.generate(prompts, params, use_tqdm=False)
        least = min(least, (time.thread_time() - started) / (executor.steps - before))
    return least * 1e3


def host() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,32,256", help="numbers of requests")
    sizes = [int(rows) for rows in parser.parse_args().rows.split(",")]
    pages = {"max_decoding_batch": max(sizes), "kv_cache_memory": 1 << 28}
    llm = LLM(model="demo", max_lease=1, **pages)  # a stub answers with one token
    engine: Any = llm._engine
    engine._engine._pipeline._executor = InstantExecutor()
    print("| rows | in parts, ms a step | whole | whole, without text |\n|---|---|---|---|")
    for rows in sizes:
        values = [
            milliseconds(llm, rows, stop=["never written"]),
            milliseconds(llm, rows),
            milliseconds(llm, rows, detokenize=False),
        ]
        print(f"| {rows} | {' | '.join(f'{value:.2f}' for value in values)} |")


if __name__ == "__main__":
    run(__doc__, http, channel, executors, host)

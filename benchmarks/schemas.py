"""What schemas and tools of requests cost beside the engine; structured.py has what masks cost.

    python benchmarks/schemas.py http [--requests 30] [--seconds 20] [--rate 20]
    python benchmarks/schemas.py tools [--rounds 20]

http: a server with the model of structured.py. first token: requests in turns: free, with a schema
that the server has seen, with a new one. neighbours: four streams at a time, first alone, then
while requests for one token arrive at --rate a second: free ones, then each with a hard schema that
is new.
tools: per request and per token, without an engine. first, known: reading a request's tools and
making their rules, unseen and seen before. of an API: reading known tools from its body to the
rules and to what a chat template reads. plain, parsed: a token of an answer to text, without and
with a parser, tokens one by one. arguments: a call with 100 kB of arguments.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sections import run
from server import served
from structured import make_model, schemas

from rayfin.actors.config import EngineArgs
from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.anthropic.bodies import MessagesRequest
from rayfin.deployments.api.anthropic.tools import answer_rules as message_rules
from rayfin.deployments.api.openai.bodies import ChatCompletionRequest
from rayfin.deployments.api.responses.bodies import ResponseRequest
from rayfin.deployments.api.responses.tools import answer_rules as response_rules
from rayfin.deployments.api.responses.tools import repeated_tools
from rayfin.deployments.bench.endpoint import stream_pieces
from rayfin.deployments.generation.plan import AnswerRules, OutputPlan, make_plan
from rayfin.deployments.guidance.tool_choice import read_tool_choice
from rayfin.deployments.guidance.tools import declared_tools
from rayfin.deployments.serve.preflight import tokenizer_path
from rayfin.deployments.text.messages import PlainTools, plain_tools
from rayfin.deployments.text.output import OutputText
from rayfin.deployments.text.parsing.detect import detect
from rayfin.deployments.text.tokenizer import Tokenizer

NEIGHBOURS = 4
NEIGHBOUR_TOKENS = 48
numbers = itertools.count()


def plain_schema() -> dict[str, Any]:
    """A small schema that no server has seen."""
    return schemas(1, seed=1000 + next(numbers))[0]


def hard_schema() -> dict[str, Any]:
    """Some 6 kB that no server has seen: nested objects, patterns, references, a union."""
    number = next(numbers)
    rng = random.Random(number)

    def an_object(depth: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            f"field_{number}_{place}": rng.choice(
                [
                    {"type": "string", "pattern": f"^[a-z]{{{place + 1},20}}-[0-9]{{2,8}}$"},
                    {"type": "string", "format": "date-time"},
                    {"enum": [f"{number} {one}" for one in range(12)]},
                    {"type": "number", "minimum": -number, "maximum": 10 * number + 7},
                    {"$ref": "#/$defs/node"},
                ]
            )
            for place in range(8)
        }
        if depth:
            fields["inner"] = an_object(depth - 1)
        return {"type": "object", "properties": fields, "required": list(fields)}

    node = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    }
    return {**an_object(4), "$defs": {"node": node}}


async def ask(
    api: httpx.AsyncClient, tokens: int, schema: dict[str, Any] | None = None
) -> list[float]:
    """The seconds of a stream's events, counted from its request."""
    body: dict[str, Any] = {
        "prompt": [random.randrange(300, 9000) for _ in range(64)],
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
    }
    if schema is None:
        body["ignore_eos"] = True
    else:
        body["structured_outputs"] = {"json": schema}
    started, times = time.perf_counter(), []
    async for _ in stream_pieces(api, "/completions", body):
        times.append(time.perf_counter() - started)
    return times


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def first_tokens(api: httpx.AsyncClient, requests: int) -> None:
    seen = plain_schema()
    kinds: dict[str, Callable[[], dict[str, Any] | None]] = {
        "free": lambda: None,
        "seen": lambda: seen,
        "new": plain_schema,
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for place in range(requests + 3):
        for name, schema in kinds.items():
            first = (await ask(api, 4, schema()))[0]
            if place >= 3:
                seconds[name].append(first)
    free = statistics.median(seconds["free"])
    print("| first token of | p50, ms | p99 | p50 over free |\n|---|---|---|---|")
    for name, values in seconds.items():
        p50 = statistics.median(values)
        print(
            f"| {name} | {1000 * p50:.1f} | {percentile(values, 0.99):.1f} "
            f"| {1000 * (p50 - free):+.1f} |"
        )


async def neighbours(api: httpx.AsyncClient, seconds: float) -> tuple[list[float], list[float]]:
    """(times to a first token, times between tokens) of streams that run side by side."""
    first: list[float] = []
    between: list[float] = []
    end = time.perf_counter() + seconds

    async def run() -> None:
        while time.perf_counter() < end:
            times = await ask(api, NEIGHBOUR_TOKENS)
            first.append(times[0])
            between.extend(b - a for a, b in itertools.pairwise(times))

    await asyncio.gather(*(run() for _ in range(NEIGHBOURS)))
    return first, between


async def send(
    api: httpx.AsyncClient,
    rate: float,
    schema: Callable[[], dict[str, Any]] | None,
    counts: Counter[int],
) -> None:
    """Sends requests for one token until it is cancelled; counts the answers by their status.

    Raises:
        httpx.HTTPStatusError: One failed. 429 is an answer: too many grammars wait.
    """

    async def one() -> None:
        form = {} if schema is None else {"structured_outputs": {"json": schema()}}
        body = {"prompt": "x", "max_tokens": 1, **form}
        reply = await api.post("/completions", json=body)
        if reply.status_code != 429:
            reply.raise_for_status()
        counts[reply.status_code] += 1

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(one())
            await asyncio.sleep(1 / rate)


async def disturbed(api: httpx.AsyncClient, seconds: float, rate: float) -> None:
    await neighbours(api, 3)
    print(
        "\n| neighbours, ms | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | "
        "beside them: answered | refused |\n|---|---|---|---|---|---|---|"
    )
    for name, schema in (("alone", None), ("free requests", None), ("new schemas", hard_schema)):
        counts: Counter[int] = Counter()
        sender = None if name == "alone" else asyncio.create_task(send(api, rate, schema, counts))
        measured = await neighbours(api, seconds)
        if sender is not None:
            assert not sender.done(), sender.exception()
            sender.cancel()
            await asyncio.wait([sender])
        row = [percentile(values, share) for values in measured for share in (0.5, 0.99)]
        figures = " | ".join(f"{value:.1f}" for value in row)
        print(f"| {name} | {figures} | {counts[200]} | {counts[429]} |")


async def measure(url: str, options: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=120, limits=limits) as api:
        await first_tokens(api, options.requests)
        await disturbed(api, options.seconds, options.rate)


def http() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with served(folder, "--max-model-len", "2048") as url:
            asyncio.run(measure(url, options))


TEXT = "It is sunny in Paris, 18 degrees. " * 60


def make_tools(count: int, salt: str = "") -> list[dict[str, Any]]:
    """Strict functions of half a kilobyte each."""
    properties = {name: {"type": "string", "description": "x" * 60} for name in ("city", "unit")}
    schema = {"type": "object", "properties": properties, "required": ["city", "unit"]}
    function = {"parameters": schema, "strict": True, "description": f"{salt}{'y' * 120}"}
    return [
        {"type": "function", "function": {"name": f"get_{i}", **function}} for i in range(count)
    ]


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of Responses."""
    return {"type": "function", **tool["function"]}


def as_message(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of Messages."""
    inner = dict(tool["function"])
    return {"input_schema": inner.pop("parameters"), **inner}


def of_a_chat(body: ChatCompletionRequest) -> tuple[AnswerRules, PlainTools | None]:
    return body.answer_rules(), body.declared_tools.shown


def of_a_response(body: ResponseRequest) -> tuple[AnswerRules, PlainTools | None]:
    repeated_tools(body)
    return response_rules(body), body.declared_tools.shown


def of_a_message(body: MessagesRequest) -> tuple[AnswerRules, PlainTools | None]:
    return message_rules(body), body.declared_tools.shown


def best(rounds: int, work: Callable[[int], object]) -> float:
    """The processor seconds of the fastest round."""
    times = []
    for number in range(rounds):
        started = time.process_time()
        work(number)
        times.append(time.process_time() - started)
    return min(times)


def tools() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    tokenizer = Tokenizer.load(tokenizer_path(EngineArgs.from_dict({"model": "demo"})))
    formats = detect(tokenizer)

    def plan(declared: list[dict[str, Any]]) -> OutputPlan:
        functions = declared_tools(declared).functions
        rules = AnswerRules(functions, read_tool_choice("auto", functions))
        return make_plan(formats, tokenizer, rules)

    def read(ids: list[int], output_plan: OutputPlan | None) -> None:
        request = EngineRequest("r", np.array([5], np.int32), Sampling(), StopRules(10**6))
        output = OutputText(
            tokenizer, SamplingParams(), request, output_plan and output_plan.parser()
        )
        for token in ids:
            output.push(TokenDelta("r", [token]))

    for count in (1, 8, 128):
        first = best(rounds, lambda i, n=count: plan(make_tools(n, f"{i} ")))
        declared = make_tools(count)
        known = best(rounds, lambda _, listed=declared: plan(listed))
        size = len(json.dumps(declared)) / 1000
        print(
            f"{count} tools, {size:.0f} kB: first {1e3 * first:.2f} ms, known {1e3 * known:.2f} ms"
        )
    control = tokenizer.control_tokens
    forms = (
        ("chat", ChatCompletionRequest, lambda tool: tool, of_a_chat),
        ("Responses", ResponseRequest, flat, of_a_response),
        ("Messages", MessagesRequest, as_message, of_a_message),
    )
    for name, kind, form, read_body in forms:
        written = [form(tool) for tool in make_tools(128)]

        def known_body(
            _: int, kind: Any = kind, written: Any = written, read: Any = read_body
        ) -> None:
            rules, shown = read(kind(tools=written))
            plain_tools(shown).find(control)
            make_plan(formats, tokenizer, rules)

        with_tools = best(rounds, known_body)
        print(f"128 known tools of a body of {name}: {1e3 * with_tools:.2f} ms")
    chat_plan, ids = plan(make_tools(1)), tokenizer.encode(TEXT, False)
    plain = best(rounds, lambda _: read(ids, None)) / len(ids)
    parsed = best(rounds, lambda _: read(ids, chat_plan)) / len(ids)
    print(f"a token of text: plain {1e6 * plain:.1f} us, parsed {1e6 * parsed:.1f} us")
    arguments = json.dumps({"city": "x y " * 25_000, "unit": "c"})
    call = f'<tool_call>\n{{"name": "get_0", "arguments": {arguments}}}\n</tool_call>'
    ids = tokenizer.encode(call, False)
    alone = best(3, lambda _: read(ids, None)) / len(ids)
    whole = best(3, lambda _: read(ids, chat_plan)) / len(ids)
    print(
        f"a token of 100 kB of arguments: plain {1e6 * alone:.1f} us, parsed {1e6 * whole:.1f} us"
    )


if __name__ == "__main__":
    run(__doc__, http, tools)

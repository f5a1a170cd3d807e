"""A batch of lines that runs while the processes under it are killed."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from history import Record
from load import Ask, add_events
from nemesis import Nemesis

VICTIMS = ("batches", "ingress", "scheduler", "runner")
ENDPOINT = "/v1/completions"
POLL_SECONDS = 0.1
PATIENCE = 300.0  # for a batch to go on


def batch_under_kills(lines: int, kills: int) -> Callable[[Nemesis], Awaitable[None]]:
    """Kills a worker, ingress, scheduler or runner at ``kills`` random points of a batch."""

    async def act(nemesis: Nemesis) -> None:
        asks = [nemesis.load.asks.line() for _ in range(lines)]
        async with httpx.AsyncClient(base_url=nemesis.cluster.url, timeout=30) as http:
            client = BatchClient(http, nemesis.cluster.model)
            batch = await client.create(asks)
            points = sorted(nemesis.random.sample(range(1, lines * 9 // 10), kills))
            for number, point in enumerate(points):
                await client.reach(batch, point)
                if number % len(VICTIMS) == 0:
                    victims = nemesis.random.sample(VICTIMS, len(VICTIMS))
                await kill_one(nemesis, victims[number % len(VICTIMS)])
            ended = await client.reach(batch, lines)
            answers = await client.answers(ended)
        nemesis.complaints += answered_once(asks, ended, answers)
        by_name = {answer["custom_id"]: answer for answer in answers}
        for ask in asks:
            nemesis.load.records.append((ask, record_of(ask, by_name.get(ask.name))))

    return act


async def kill_one(nemesis: Nemesis, what: str) -> None:
    """Kills one process of a kind, as soon as there is one."""
    await nemesis.until(lambda: nemesis.cluster.pids(what), f"a process of {what} lives")
    nemesis.kill(what)


class BatchClient:
    """A client of /v1/files and /v1/batches that asks again while the server is away."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def create(self, asks: list[Ask]) -> str:
        """Uploads the lines, starts their batch, and returns its id."""
        lines = [line_of(ask, self._model) for ask in asks]
        data = "\n".join(map(json.dumps, lines)).encode()
        files = {"file": ("lines.jsonl", data)}
        file = await self._call("POST", "/v1/files", files=files, data={"purpose": "batch"})
        body = {"input_file_id": file.json()["id"], "endpoint": ENDPOINT}
        batch = await self._call("POST", "/v1/batches", json=body | {"completion_window": "24h"})
        return str(batch.json()["id"])

    async def reach(self, batch: str, count: int) -> dict[str, Any]:
        """Waits until ``count`` lines have an answer, or the batch has ended.

        Raises:
            TimeoutError: it does not go on.
        """
        async with asyncio.timeout(PATIENCE):
            while True:
                status: dict[str, Any] = (await self._call("GET", f"/v1/batches/{batch}")).json()
                counts = status["request_counts"]
                done = counts["completed"] + counts["failed"]
                ended = status["status"] not in ("validating", "in_progress", "finalizing")
                if ended or (done >= count and done < counts["total"]):
                    return status
                await asyncio.sleep(POLL_SECONDS)

    async def answers(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines of its output and of its errors."""
        answers: list[dict[str, Any]] = []
        for name in ("output_file_id", "error_file_id"):
            if batch[name]:
                content = await self._call("GET", f"/v1/files/{batch[name]}/content")
                answers += [json.loads(line) for line in content.text.split("\n") if line]
        return answers

    async def _call(self, method: str, path: str, **body: Any) -> httpx.Response:
        """Returns an answer that is none of an absent server."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    answer = await self._http.request(method, path, **body)
                    if answer.status_code < 500:
                        return answer.raise_for_status()
                except httpx.TransportError:
                    pass
                await asyncio.sleep(POLL_SECONDS)


def line_of(ask: Ask, model: str) -> dict[str, Any]:
    """A line of a batch in OpenAI's form."""
    body = ask.body(model)
    return {"custom_id": ask.name, "method": "POST", "url": ENDPOINT, "body": body}


def answered_once(
    asks: list[Ask], batch: dict[str, Any], answers: list[dict[str, Any]]
) -> list[str]:
    """What contradicts: each line has one answer, and the counts say so."""
    complaints = []
    if batch["status"] != "completed":
        complaints.append(f"the batch is {batch['status']}")
    counts = Counter(answer["custom_id"] for answer in answers)
    complaints += [
        f"{ask.name}: {counts[ask.name]} answers" for ask in asks if counts[ask.name] != 1
    ]
    if strangers := sorted(set(counts) - {ask.name for ask in asks}):
        complaints.append(f"answers of no line: {strangers[:4]}")
    shown = batch["request_counts"]
    if (shown["total"], shown["completed"] + shown["failed"]) != (len(asks), len(answers)):
        complaints.append(f"the counts say {shown}, the files have {len(answers)} answers")
    return complaints


def record_of(ask: Ask, answer: dict[str, Any] | None) -> Record:
    """A line's answer as its client's history, which the checker compares with the oracle's."""
    now = time.monotonic()
    # A line whose worker died may be computed twice.
    record = Record(ask.name, now, stream=False, again=1, done=True, ended=now)
    response = None if answer is None else answer["response"]
    if response is None:
        record.error = "no_answer"
        return record
    record.status = response["status_code"]
    add_events(record, response["body"])
    return record

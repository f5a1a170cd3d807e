"""What new weights cost: seconds of an update by each transport, and the gap that streams see.

    python benchmarks/weights.py [--streams 8] [--rounds 3] [--shape 135m]

A server has a model of random weights, and streams that go on all the time. Each round gives it the
same tensors, times another factor, by a folder ("path"), a body ("http") and a gloo group ("gloo").
Prints medians: of the whole update and of the pause as the server says them, of the bytes' way, and
of the longest gap of a stream from the update's begin to its end, beside that of streams alone.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from engines import make_model
from lora import Stream, gaps_within
from safetensors.torch import load_file, save_file
from server import free_ports, served
from shapes import SHAPES

KEY = "operator"
ADMIN = {"Authorization": f"Bearer {KEY}"}
PATIENCE = 300.0

Tensors = dict[str, torch.Tensor]
Row = tuple[float, float, float, float]
"""Seconds: of the bytes' way, of the update, of its pause, and the longest gap of a stream."""


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

    async def path(self, tensors: Tensors, label: str) -> tuple[float, Any]:
        """By a file that the server sees."""
        begun = time.perf_counter()
        path = self._folder / f"{label}.safetensors"
        save_file(tensors, path, {"format": "pt"})
        seconds = time.perf_counter() - begun
        return seconds, await self._post("/admin/weights", {"path": str(path), "version": label})

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
        shapes = [list(own.shape) for own in tensors.values()]
        dtypes = [str(own.dtype).removeprefix("torch.") for own in tensors.values()]
        update = {"names": list(tensors), "dtype_names": dtypes, "shapes": shapes}
        comes = asyncio.create_task(self._post("/update_weights", {"update_info": update}))
        for own in tensors.values():
            await asyncio.to_thread(dist.broadcast, own, 0)
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
            "http": trainer.http,
            "gloo": trainer.gloo,
        }
        streams = [Stream() for _ in range(options.streams)]
        tasks = [asyncio.create_task(own.run(api, "m", seed)) for seed, own in enumerate(streams)]
        while not all(len(own.times) > 2 for own in streams):
            await asyncio.sleep(0.1)
        found: dict[str, list[Row]] = {name: [] for name in ("alone", *sends)}
        for number, name in itertools.product(range(options.rounds), found):
            tensors = {key: own * (1 + 0.01 * number) for key, own in base.items()}
            begun, report, sent = time.perf_counter(), {"seconds": 0.0, "pause_seconds": 0.0}, 0.0
            if name == "alone":
                await asyncio.sleep(options.seconds)
            else:
                sent, report = await sends[name](tensors, f"{name}-{number}")
                await asyncio.sleep(1.0)  # the gap ends behind the update
            ended = time.perf_counter()
            gaps = [gap for own in streams for gap in gaps_within(own.times, begun, ended)]
            row = (sent, report["seconds"], report["pause_seconds"], max(gaps, default=0.0))
            found[name].append(row)
        assert not any(task.done() for task in tasks), "a stream has ended: fewer rounds"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def table(found: dict[str, list[Row]]) -> list[str]:
    """A row of Markdown for each transport."""
    lines = ["| by | bytes, s | update, s | pause, s | longest gap, s |", "|---|---|---|---|---|"]
    for name, rows in found.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        lines.append(f"| {name} | {' | '.join(f'{own:.2f}' for own in medians)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of streams alone")
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", options.shape, "float32")
        flags = ("--served-model-name", "m", "--admin-api-key", KEY)
        with served(str(folder / "model"), *flags) as url:
            print(*table(asyncio.run(measure(url, folder, options))), sep="\n")


if __name__ == "__main__":
    main()

"""Injects faults: signals, limits, and misbehaving clients. The word is Jepsen's."""

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx
from cluster import Cluster, eventually
from history import Record
from load import Ask, Load


class Nemesis:
    """Injects faults into one cluster under one load, and records their times."""

    def __init__(self, cluster: Cluster, load: Load, seed: int) -> None:
        self.cluster = cluster
        self.load = load
        self.random = random.Random(seed)
        self.struck: list[float] = []  # time.monotonic() of each fault
        self.complaints: list[str] = []  # violations that faults themselves observed

    def strike(self) -> None:
        """Records a fault now."""
        self.struck.append(time.monotonic())

    def kill(self, what: str, count: int = 1) -> list[int]:
        """Sends SIGKILL to random processes of actors of a kind."""
        pids = self._some(what, count)
        self.strike()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def signal(self, pids: list[int], number: signal.Signals) -> None:
        """Signals those processes that still live."""
        self.strike()
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    async def pause(self, what: str, seconds: float, count: int = 1) -> None:
        """Sends SIGSTOP and, after ``seconds``, SIGCONT."""
        pids = self._some(what, count)
        self.signal(pids, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue

    async def slow_down(self, what: str, seconds: float, share: float = 0.2) -> None:
        """Lets one process run for only this share of the time."""
        pids, end = self._some(what, 1), time.monotonic() + seconds
        self.strike()
        while time.monotonic() < end:
            for number, turn in ((signal.SIGSTOP, 1 - share), (signal.SIGCONT, share)):
                for pid in pids:
                    os.kill(pid, number)
                await asyncio.sleep(turn / 10)

    async def kill_every(self, what: str, pause: float, seconds: float) -> None:
        """Kills one actor of a kind every ``pause`` seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if await asyncio.to_thread(self.cluster.pids, what):
                self.kill(what)
            await asyncio.sleep(pause)

    def plant(self, text: str) -> None:
        """Sets failpoints."""
        self.strike()
        self.cluster.plant(text)

    def plant_once(self, *faults: str) -> None:
        """Sets failpoints that fire once each, in the first process to reach them."""
        marks = [tempfile.mktemp(prefix="once-", dir=self.cluster.folder) for _ in faults]
        pairs = zip(faults, marks, strict=True)
        self.plant(";".join(f"{fault}@once:{mark}" for fault, mark in pairs))

    async def must_fail(self, ask: Ask, seconds: float = 40) -> None:
        """Sends a request that no engine can run; it must be refused in time."""
        task = self.load.start(ask)
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            self.complaints.append(f"{ask.name} is still open after {seconds} s")
        elif not task.result().error:
            self.complaints.append(f"{ask.name} was not refused")

    async def until(self, probe: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Waits for ``probe`` while the load continues."""
        await asyncio.to_thread(eventually, probe, what, seconds)

    def kill_raylet(self, index: int) -> None:
        """Sends SIGKILL to a node's raylet; the node's actors notice it themselves."""
        self.strike()
        self.cluster.nodes[index].kill_raylet(check_alive=False)

    def lose_node(self, index: int) -> None:
        """Sends SIGKILL to all processes of a node at once."""
        node = self.cluster.nodes[index]
        workers = self.cluster.workers_of(node)
        self.strike()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    async def stop_node(self, index: int, seconds: float) -> None:
        """Stops all processes of a node for ``seconds``, as if it were cut off."""
        node = self.cluster.nodes[index]
        pids = self.cluster.workers_of(node)
        pids += [each.process.pid for group in node.all_processes.values() for each in group]
        self.signal(pids, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.signal(pids, signal.SIGCONT)

    async def restart_gcs(self, after: float) -> None:
        """Kills the GCS and starts a new one after ``after`` seconds, on the same Redis."""
        head = self.cluster.nodes[0]
        self.strike()
        await asyncio.to_thread(head.kill_gcs_server, False)
        await asyncio.sleep(after)
        await asyncio.to_thread(head.start_gcs_server)

    def limit(self, pid: int, what: int, value: int) -> None:
        """Sets a soft limit of another process (``resource.RLIMIT_...``)."""
        self.strike()
        _, hard = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (value, hard))

    def fill_object_store(self, mebibytes: int) -> "subprocess.Popen[bytes]":
        """Starts another job that puts and holds more objects than fit."""
        self.strike()
        program = (
            "import ray, numpy as np; ray.init(address='auto', log_to_driver=False); held = []\n"
            f"for _ in range({mebibytes}): held.append(ray.put(np.zeros(2**20, np.uint8)))\n"
            "import time; time.sleep(600)"
        )
        address = {**os.environ, "RAY_ADDRESS": self.cluster.nodes[0].gcs_address}
        return subprocess.Popen(
            [sys.executable, "-c", program],
            env=address,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def fill_disk(self) -> None:
        """Writes to the folder of Ray's sessions until nothing more fits."""
        self.strike()
        with open(self._filler, "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(b"\0" * 2**16)
            except OSError:
                return

    def empty_disk(self) -> None:
        """Frees what ``fill_disk`` wrote."""
        os.unlink(self._filler)

    @property
    def _filler(self) -> str:
        return os.path.join(self.cluster.ray_folder, "filler")

    def set_clock(self, ahead: float) -> None:
        """Sets the cluster's wall clock ``ahead`` seconds ahead (worker/)."""
        self.strike()
        fresh = os.path.join(self.cluster.folder, "clock.new")
        with open(fresh, "w") as file:
            file.write(str(ahead))
        os.rename(fresh, os.path.join(self.cluster.folder, "clock"))

    async def enters(self, program: str, token: str | None, seconds: float = 20) -> bool:
        """Whether a program can join the cluster within ``seconds``.

        ``token`` authenticates it; None uses the cluster's.
        """
        self.strike()
        variables = {} if token is None else {"RAY_AUTH_TOKEN": token}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", program.format(address=self.cluster.nodes[0].gcs_address)),
            env={**os.environ, **variables},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            output = await asyncio.wait_for(process.stdout.read(), seconds)
        except TimeoutError:
            output = b""
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return b"inside" in output

    async def scrape(self, count: int, times: int) -> None:
        """Reads /metrics ``times`` times per client, once a second."""
        self.strike()

        async def read(http: httpx.AsyncClient) -> None:
            for _ in range(times):
                with suppress(httpx.HTTPError):
                    await http.get("/metrics")
                await asyncio.sleep(1)

        async with httpx.AsyncClient(base_url=self.cluster.url, timeout=10) as http:
            await self._together(count, lambda: read(http))

    async def slow_readers(self, count: int, seconds: float) -> None:
        """Starts clients that request long answers and read nothing."""
        self.strike()
        await self._together(count, lambda: self._read_nothing(seconds))

    async def disconnects(self, count: int, seconds: float) -> None:
        """Starts clients that disconnect at random times."""
        self.strike()
        await self._together(count, lambda: self._leave(self.random.uniform(0, seconds)))

    async def herd(self, count: int) -> dict[int, int]:
        """Sends ``count`` short requests at once; returns the number of responses by status."""
        self.strike()
        statuses: dict[int, int] = {}

        async def ask() -> None:
            record = await self.load.ask(self.load.asks.short())
            status = record.status or 0
            statuses[status] = statuses.get(status, 0) + 1

        await self._together(count, ask)
        return statuses

    async def _leave(self, after: float) -> None:
        task = self.load.start(self.load.asks.stream())
        await asyncio.sleep(after)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _read_nothing(self, seconds: float) -> None:
        ask = self.load.asks.endless()
        self.load.records.append((ask, Record(ask.name, time.monotonic(), left=True)))
        url = f"{self.cluster.url}/v1/completions"
        async with httpx.AsyncClient(timeout=seconds + 60) as http:
            try:
                async with http.stream("POST", url, json=ask.body(self.cluster.model)):
                    await asyncio.sleep(seconds)
            except httpx.HTTPError:  # the server gives the client up, as intended
                return

    async def _together(self, count: int, act: Callable[[], Awaitable[object]]) -> None:
        await asyncio.gather(*(act() for _ in range(count)))

    def _some(self, what: str, count: int) -> list[int]:
        pids = self.cluster.pids(what)
        return self.random.sample(pids, min(count, len(pids)))

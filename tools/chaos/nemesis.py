"""What breaks things: signals, limits, and clients that misbehave. Processes are known by id only.

The nemesis of Jepsen's tests, whose word it is.
"""

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
    """Breaks one cluster while one load runs, and remembers when."""

    def __init__(self, cluster: Cluster, load: Load, seed: int) -> None:
        self.cluster = cluster
        self.load = load
        self.random = random.Random(seed)
        self.struck: list[float] = []  # time.monotonic() of each fault
        self.complaints: list[str] = []  # what a fault itself saw that must not be

    def strike(self) -> None:
        """A fault happens now."""
        self.struck.append(time.monotonic())

    def kill(self, what: str, count: int = 1) -> list[int]:
        """SIGKILL to processes of actors of a kind, drawn at random."""
        pids = self._some(what, count)
        self.strike()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def signal(self, pids: list[int], number: signal.Signals) -> None:
        """Signals what still lives."""
        self.strike()
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    async def pause(self, what: str, seconds: float, count: int = 1) -> None:
        """SIGSTOP, and SIGCONT after so long, to whatever is left of them."""
        pids = self._some(what, count)
        self.signal(pids, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue

    async def slow_down(self, what: str, seconds: float, share: float = 0.2) -> None:
        """One process gets only this share of the time."""
        pids, end = self._some(what, 1), time.monotonic() + seconds
        self.strike()
        while time.monotonic() < end:
            for number, turn in ((signal.SIGSTOP, 1 - share), (signal.SIGCONT, share)):
                for pid in pids:
                    os.kill(pid, number)
                await asyncio.sleep(turn / 10)

    async def kill_every(self, what: str, pause: float, seconds: float) -> None:
        """Kills one, again and again; none that is being started, which has no process yet."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if await asyncio.to_thread(self.cluster.pids, what):
                self.kill(what)
            await asyncio.sleep(pause)

    def plant(self, text: str) -> None:
        """Plants failpoints."""
        self.strike()
        self.cluster.plant(text)

    def plant_once(self, *faults: str) -> None:
        """Plants failpoints that fire once each, in whatever process is there first."""
        marks = [tempfile.mktemp(prefix="once-", dir=self.cluster.folder) for _ in faults]
        pairs = zip(faults, marks, strict=True)
        self.plant(";".join(f"{fault}@once:{mark}" for fault, mark in pairs))

    async def must_fail(self, ask: Ask, seconds: float = 40) -> None:
        """A request that no engine can run: it alone is refused, and soon."""
        task = self.load.start(ask)
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            self.complaints.append(f"{ask.name} is still open after {seconds} s")
        elif not task.result().error:
            self.complaints.append(f"{ask.name} was not refused")

    async def until(self, probe: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Waits, with the load going on."""
        await asyncio.to_thread(eventually, probe, what, seconds)

    def kill_raylet(self, index: int) -> None:
        """SIGKILL to a node's raylet; the node's actors notice by themselves."""
        self.strike()
        self.cluster.nodes[index].kill_raylet(check_alive=False)

    def lose_node(self, index: int) -> None:
        """SIGKILL to all processes of a node at once."""
        node = self.cluster.nodes[index]
        workers = self.cluster.workers_of(node)
        self.strike()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    async def stop_node(self, index: int, seconds: float) -> None:
        """SIGSTOP to all processes of a node, and SIGCONT: nothing goes in or out meanwhile."""
        node = self.cluster.nodes[index]
        pids = self.cluster.workers_of(node)
        pids += [own.process.pid for group in node.all_processes.values() for own in group]
        self.signal(pids, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.signal(pids, signal.SIGCONT)

    async def restart_gcs(self, after: float) -> None:
        """SIGKILL to the GCS; a new one after so many seconds, on the same Redis."""
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
        """A job of somebody else's that puts more than there is room for, and holds on to it."""
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
        """Gives back what ``fill_disk`` took."""
        os.unlink(self._filler)

    @property
    def _filler(self) -> str:
        return os.path.join(self.cluster.ray_folder, "filler")

    def set_clock(self, ahead: float) -> None:
        """The cluster's processes find the wall clock so many seconds ahead (worker/)."""
        self.strike()
        fresh = os.path.join(self.cluster.folder, "clock.new")
        with open(fresh, "w") as file:
            file.write(str(ahead))
        os.rename(fresh, os.path.join(self.cluster.folder, "clock"))

    async def enters(self, program: str, token: str | None, seconds: float = 20) -> bool:
        """Whether a program that asks the cluster to be let in gets there, in so many seconds.

        ``token``: what it shows; None: the cluster's own.
        """
        self.strike()
        shown = {} if token is None else {"RAY_AUTH_TOKEN": token}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", program.format(address=self.cluster.nodes[0].gcs_address)),
            env={**os.environ, **shown},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            said = await asyncio.wait_for(process.stdout.read(), seconds)
        except TimeoutError:
            said = b""
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return b"inside" in said

    async def scrape(self, count: int, times: int) -> None:
        """So many readers of /metrics, each so many times, once a second."""
        self.strike()

        async def read(http: httpx.AsyncClient) -> None:
            for _ in range(times):
                with suppress(httpx.HTTPError):
                    await http.get("/metrics")
                await asyncio.sleep(1)

        async with httpx.AsyncClient(base_url=self.cluster.url, timeout=10) as http:
            await self._together(count, lambda: read(http))

    async def slow_readers(self, count: int, seconds: float) -> None:
        """Clients that ask for long answers and read nothing of them."""
        self.strike()
        await self._together(count, lambda: self._read_nothing(seconds))

    async def disconnects(self, count: int, seconds: float) -> None:
        """Clients that leave, each at some moment of its request."""
        self.strike()
        await self._together(count, lambda: self._leave(self.random.uniform(0, seconds)))

    async def herd(self, count: int) -> dict[int, int]:
        """So many clients at once, each with one short request; how many got which status."""
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
            except httpx.HTTPError:  # it was given up, as it should be
                return

    async def _together(self, count: int, act: Callable[[], Awaitable[object]]) -> None:
        await asyncio.gather(*(act() for _ in range(count)))

    def _some(self, what: str, count: int) -> list[int]:
        pids = self.cluster.pids(what)
        return self.random.sample(pids, min(count, len(pids)))

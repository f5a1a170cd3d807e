"""Two hosts, as network namespaces with a line between them that is slow, and that is cut."""

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.messages import PageTransfer
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.runner.pages import peers
from rayfin.actors.runner.pages.peers import PageServer, Peers
from rayfin.actors.runner.pages.transfers import PageTransfers
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.cache.prefix_index import PageName

pytestmark = pytest.mark.slow(reason="lines that are slow and cut")

CLONE_NEWNET = 0x40000000
PAGES, SIZE = 8, 16
HASHES = [sha256(bytes([number])).digest() for number in range(PAGES)]
TOKENS = np.arange(PAGES * SIZE, dtype=np.int32).reshape(PAGES, SIZE)
GREETING = bytes(32)


def call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def inside(host: str, work: Callable[[], Any]) -> Any:
    """Does something in a thread of a network namespace, whose new sockets are there."""
    answers: list[Any] = []

    def enter() -> None:
        space = os.open(f"/var/run/netns/{host}", os.O_RDONLY)
        try:
            assert ctypes.CDLL(None, use_errno=True).setns(space, CLONE_NEWNET) == 0
        finally:
            os.close(space)
        answers.append(work())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return answers[0]


class Hosts:
    """Host 1 has pages, host 2 reads them."""

    def __init__(self, names: list[str], end: str) -> None:
        self.names, self._end = names, end
        self.caches = []
        for _ in names:
            layouts = [KVLayout(2, 256, 256)]
            self.caches.append(KVTensors(layouts, PAGES, SIZE, torch.float32, torch.device("cpu")))
        for tensor in (*self.caches[0].keys, *self.caches[0].values):
            tensor.normal_()
        known = PageNames()
        known._know({n: PageName(HASHES[n], TOKENS[n].tobytes()) for n in range(PAGES)})
        there = self._transfers(self.caches[0], known, None)
        self.server = PageServer(known, lambda: there, lambda: GREETING)
        self.peers = Peers(
            lambda engine: inside(names[0], lambda: self.server.address("10.201.78.1")),
            lambda: GREETING,
        )
        self._here = self._transfers(self.caches[1], PageNames(), self.peers)

    def _transfers(self, cache: KVTensors, names: PageNames, source: Any) -> PageTransfers:
        transfers = PageTransfers(0, lambda: (1, 1), names.overwritten, names, source)
        transfers.use(cache, 1)
        return transfers

    def read(self, seconds: float = 20.0) -> int:
        whole = [*range(PAGES)]
        settings: dict[str, Any] = {"source": "there", "seconds": seconds, "after": (1, 0)}
        transfer = PageTransfer(False, whole, HASHES, TOKENS, [], **settings)
        count: int = inside(self.names[1], lambda: self._here.run(transfer))
        return count

    def limit(self, rate: str) -> None:
        words = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "50ms")
        call("tc", "-n", self.names[0], "qdisc", "replace", "dev", f"{self._end}a", *words)

    def turn(self, state: str) -> None:
        call("ip", "-n", self.names[0], "link", "set", f"{self._end}a", state)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, ip and tc")
    names, end = [f"rayfin-{os.getpid()}-{letter}" for letter in "ab"], f"rf{os.getpid()}"
    try:
        try:
            for name in names:
                call("ip", "netns", "add", name)
            call("ip", "link", "add", f"{end}a", "type", "veth", "peer", "name", f"{end}b")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
        for number, (name, letter) in enumerate(zip(names, "ab", strict=True), start=1):
            call("ip", "link", "set", f"{end}{letter}", "netns", name)
            call("ip", "-n", name, "addr", "add", f"10.201.78.{number}/24", "dev", f"{end}{letter}")
            call("ip", "-n", name, "link", "set", f"{end}{letter}", "up")
        yield Hosts(names, end)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_all_pages_come_by_the_line(hosts: Hosts) -> None:
    assert hosts.read() == PAGES
    for held, sent in zip(hosts.caches[1].keys, hosts.caches[0].keys, strict=True):
        assert torch.equal(held, sent)
    assert hosts.read() == PAGES and len(hosts.peers._open) == 1


def test_a_line_that_is_cut(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of it comes, so the reader's own time ends the read; later it reads again."""
    monkeypatch.setattr(peers, "PAGE_READ_SECONDS", 0.3)
    hosts.limit("2mbit")
    cut = threading.Timer(0.5, hosts.turn, ["down"])
    cut.start()
    count = hosts.read()
    cut.join()
    assert count < PAGES and not hosts.peers._open
    assert not hosts.caches[1].keys[0][count:].any(), "half a page was written"
    assert hosts.read(seconds=0.2) == 0
    hosts.turn("up")
    hosts.limit("1gbit")
    monkeypatch.undo()
    for _ in range(50):
        if hosts.read() == PAGES:
            return
        time.sleep(0.1)
    raise AssertionError("the line is there again, and nothing is read")


def test_a_slow_line_ends_with_the_time_of_the_read(hosts: Hosts) -> None:
    hosts.limit("2mbit")
    assert 0 <= hosts.read(seconds=0.8) < PAGES
    assert not hosts.peers._open, "what comes late comes nowhere"

"""What a network between two engines gives: pages by TCP from one network namespace to another.

    python benchmarks/page_line.py --rate 1gbit          # as root, on Linux with ip and tc
    python benchmarks/page_line.py --rate 20mbit --rounds 6

Two namespaces with a pair of interfaces of that rate. In one a runner has the pages of some
prompts, in the other an engine gets the prompts, one after the other, with the hint that they are
there, and each time another prompt that it has to compute. The engine's own rule decides how much
it reads. The model has random weights and the pages random content: only times count.
"""

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.messages import (
    EngineRequest,
    Int32Array,
    PagesAt,
    PageTransfer,
    Sampling,
    StopRules,
)
from rayfin.cache.prefix_index import HashChain, PageName

ADDRESS = "10.201.77.{}"
GREETING = bytes(32)
SIZE = 16  # tokens of a page


def prompt(number: int, length: int) -> Int32Array:
    draw = random.Random(number)
    return np.array([draw.randrange(2000) for _ in range(length)], np.int32)


@contextmanager
def hosts(rate: str) -> Iterator[list[str]]:
    """Two network namespaces with ``ADDRESS`` 1 and 2, and a line of so many bits a second."""
    names = [f"rayfin-{os.getpid()}-{number}" for number in (1, 2)]
    ends = [f"rf{os.getpid()}{letter}" for letter in "ab"]

    def call(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for name in names:
            call("ip", "netns", "add", name)
        call("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            call("ip", "link", "set", end, "netns", name)
            inside = ("ip", "-n", name)
            call(*inside, "addr", "add", f"{ADDRESS.format(number)}/24", "dev", end)
            call(*inside, "link", "set", end, "up")
            call(*inside, "link", "set", "lo", "up")
            limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
            call("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@dataclass
class Pending:
    """Pages on their way, as the engine sees them."""

    moved: "Future[int]"

    def done(self) -> bool:
        return self.moved.done()

    def count(self) -> int:
        return self.moved.result()


def make_args(options: argparse.Namespace) -> EngineArgs:
    return EngineArgs(
        model=options.model,
        load_format="dummy",
        dtype="float32",
        threads=1,
        page_size=SIZE,
        max_model_len=options.prompt_tokens + 64,
        kv_cache_memory=2 << 30,
    )


def source(options: argparse.Namespace) -> None:
    """Has the pages of even prompts, until it has nothing more to read."""
    from rayfin.actors.runner.model_runner import ModelRunner
    from rayfin.actors.runner.pages.peers import PageServer
    from rayfin.actors.runner.pages.transfers import PageTransfers

    args = make_args(options)
    runner = ModelRunner(args)
    runner.start(resolve(args, *runner.profile()), 1)
    names, page = {}, 0
    for number in range(0, 2 * options.rounds, 2):
        chain, tokens = HashChain(SIZE), prompt(number, options.prompt_tokens)
        chain.extend(tokens)
        for at, page_hash in enumerate(chain.hashes):
            names[page] = PageName(page_hash, tokens[at * SIZE : (at + 1) * SIZE].tobytes())
            page += 1
    runner.names._know(names)
    pages = PageTransfers(0, lambda: runner.next_step, runner.overwritten, runner.names)
    pages.use(runner.cache, 1)
    server = PageServer(runner.names, lambda: pages, lambda: GREETING)
    print(json.dumps([server.address(ADDRESS.format(1)) for _ in range(100)]), flush=True)
    sys.stdin.read()


def reader(options: argparse.Namespace) -> None:
    from rayfin.actors.runner.inline import InlineExecutor
    from rayfin.actors.runner.model_runner import ModelRunner
    from rayfin.actors.runner.pages.peers import Peers
    from rayfin.actors.runner.pages.transfers import PageTransfers
    from rayfin.actors.scheduler.engine import Engine

    addresses, args = json.loads(sys.stdin.readline()), make_args(options)
    runner = ModelRunner(args)
    config = resolve(args, *runner.profile())
    executor = InlineExecutor(runner, config)
    peers = Peers(lambda engine: str(addresses.pop()), lambda: GREETING)
    pages = PageTransfers(0, lambda: runner.next_step, runner.overwritten, runner.names, peers)
    pages.use(runner.cache, executor.epoch)
    pool = ThreadPoolExecutor(4)  # as in actors: the engine goes on meanwhile

    def transfer(what: PageTransfer) -> Pending:
        after = max(executor._submitted, (executor.epoch, -1))
        return Pending(pool.submit(pages.run, replace(what, after=after)))

    executor.transfer = transfer  # type: ignore[assignment, method-assign]
    engine = Engine(config, executor)

    def first_token(number: int, tokens: Int32Array, pages_at: PagesAt | None) -> float:
        rules = StopRules(1, frozenset(), frozenset())
        engine.add(
            EngineRequest(str(number), tokens, Sampling(), rules, key=number, pages_at=pages_at)
        )
        began = time.perf_counter()
        while engine.has_work:
            engine.step()
            time.sleep(0.0 if engine.has_steps else 0.001)
        return time.perf_counter() - began

    first_token(10**6, prompt(10**6, options.prompt_tokens), None)  # what a prompt costs
    hint = PagesAt("there", (options.prompt_tokens - 1) // SIZE)
    print("| read | pages | MB/s | TTFT, s | computed, s | share |\n|---|---|---|---|---|---|")
    shares = []
    for number in range(0, 2 * options.rounds, 2):
        before = engine.stats()
        read = first_token(number, prompt(number, options.prompt_tokens), hint)
        after = engine.stats()
        computed = first_token(number + 1, prompt(number + 1, options.prompt_tokens), None)
        shares.append(read / computed)
        came = after.pages_read["p2p", "arrived"] - before.pages_read.get(("p2p", "arrived"), 0)
        taken = after.page_read_seconds.get("p2p", 0.0) - before.page_read_seconds.get("p2p", 0.0)
        speed = came * config.page_bytes / max(taken, 1e-9) / 1e6
        figures = f"{speed:.0f} | {read:.2f} | {computed:.2f} | {shares[-1]:.2f}"
        print(f"| {number // 2 + 1} | {came} | {figures} |", flush=True)
    late = shares[3:] or shares
    print(
        f"median share: {statistics.median(shares):.2f}, from the fourth: {max(late):.2f} at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of the line, as tc writes it")
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--end", choices=("source", "reader"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.end is not None:
        (source if options.end == "source" else reader)(options)
        return
    from shapes import SHAPES

    family, sizes = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder, hosts(options.rate) as (there, here):
        config = {"model_type": family, "max_position_embeddings": 8192, **sizes}
        Path(folder, "config.json").write_text(json.dumps(config))

        def begin(host: str, end: str, **pipes: int) -> subprocess.Popen[str]:
            words = ["ip", "netns", "exec", host, sys.executable, *sys.argv]
            words += ["--end", end, "--model", folder]
            return subprocess.Popen(words, text=True, stdin=subprocess.PIPE, **pipes)  # type: ignore[call-overload, no-any-return]

        has = begin(there, "source", stdout=subprocess.PIPE)
        gets = begin(here, "reader")
        assert has.stdout is not None and gets.stdin is not None and has.stdin is not None
        try:
            ready, _, _ = select.select([has.stdout], [], [], 120)
            assert ready, "the source does not come up"
            gets.stdin.write(has.stdout.readline())
            gets.stdin.close()
            gets.wait()
        finally:
            for process in (gets, has):
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()

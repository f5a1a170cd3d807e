"""The child process of run.py: runs the cases of one layout on its cluster.

Its environment is the layout's, which Ray reads when it is imported. Each result is appended to a
file as a line of JSON at once, so that finished cases count if this process dies.
"""

import asyncio
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass

from cases import Case
from cluster import Cluster, Layout, Unavailable, suppressed
from history import Expected
from load import Ask, Asks, Load
from nemesis import Nemesis
from oracle import HashOracle, ModelOracle, Oracle
from results import Result, judge

SUCCESSES = ("stop", "length")


@dataclass(slots=True)
class Session:
    """Runs cases one after another, on a new cluster if the last one is broken."""

    layout: Layout
    folder: str
    seed: int
    streams: int | None  # None: each case's
    cluster: Cluster | None = None
    oracle: Oracle | None = None

    def run(self, case: Case) -> Result:
        """Runs one case.

        Raises:
            Unavailable: the case cannot run on this machine.
        """
        cluster = self._cluster()
        before = self._successes(cluster)
        load, nemesis = asyncio.run(self._drive(case, cluster))
        until = time.monotonic()
        leaked = cluster.pages_left()
        after = self._successes(cluster)
        # A lower count means that an engine was replaced, and says nothing about these requests.
        grown = None if before is None or after is None or after < before else after - before
        if self.layout.runner == "script":  # its clients do not count
            grown = None
        expected = self._expect([ask for ask, _ in load.records])
        result = judge(case, nemesis.struck, load.records, expected, leaked, grown, until)
        result.violations += nemesis.complaints
        result.streams, result.seed = self._streams(case), self.seed
        result.load = os.getloadavg()[0]
        if case.renews or leaked or not result.held:
            self.close()
        return result

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
        self.cluster = None

    def _cluster(self) -> Cluster:
        if self.cluster is not None and not self.cluster.healthy():
            self.close()
        if self.cluster is None:
            cluster = self.cluster = Cluster(self.layout, self.folder)
            cluster.start()
            cluster.wait_healthy()
        return self.cluster

    async def _drive(self, case: Case, cluster: Cluster) -> tuple[Load, Nemesis]:
        """Runs the load and injects the faults."""
        asks = Asks(
            self.seed,
            forms=case.forms,
            adapters=list(cluster.adapters),
            images=self.layout.images,
        )
        load = Load(cluster.url, cluster.model, asks, resumes=case.resumes)
        nemesis = Nemesis(cluster, load, self.seed)
        streams = self._streams(case)
        cluster.plant("")
        if case.idle:
            await case.act(nemesis)
        async with load.running(streams, case.rate):
            await load.all_streaming(streams)
            if not case.idle:
                await asyncio.sleep(1)
                await case.act(nemesis)
            await asyncio.sleep(case.after)
        cluster.plant("")
        return load, nemesis

    def _streams(self, case: Case) -> int:
        return case.streams if self.streams is None else self.streams

    def _successes(self, cluster: Cluster) -> float | None:
        """Returns the successes that engines have counted, less those that may be counted twice.

        A stream that ends while it is handed over ends at its new engine too.
        """
        with suppressed():
            samples = cluster.samples()
            ended = sum(samples.get(f"rayfin_request_success_total/{r}", 0) for r in SUCCESSES)
            return ended - samples.get("rayfin_moves_total", 0)
        return None

    def _expect(self, asks: list[Ask]) -> list[Expected]:
        if self.oracle is None:
            self.oracle = self._new_oracle()
        return self.oracle.expect(asks)

    def _new_oracle(self) -> Oracle:
        cluster = self.cluster
        assert cluster is not None
        if self.layout.runner != "model":
            return HashOracle()
        return ModelOracle(cluster.weights, cluster.adapters)


def main(cases: list[Case], folder: str, seed: int, streams: int | None, path: str) -> None:
    """Runs the cases of one layout and appends their results to ``path``."""
    session = Session(cases[0].layout, folder, seed, streams)
    try:
        for case in cases:
            started = time.monotonic()
            try:
                result = session.run(case)
            except Unavailable as reason:
                result = Result(case.name, case.row, case.fault, skipped=str(reason))
            except Exception as error:
                traceback.print_exc()
                result = Result(case.name, case.row, case.fault)
                result.violations.append(f"{type(error).__name__}: {error}")
                session.close()
            with open(path, "a") as file:
                print(json.dumps(result.as_dict()), file=file)
            print_result(result, time.monotonic() - started)
    finally:
        session.close()


def print_result(result: Result, seconds: float) -> None:
    state = f"not run: {result.skipped}" if result.skipped else "held" if result.held else "BROKEN"
    recovery = "-" if result.recovery is None else f"{result.recovery:.1f} s"
    print(
        f"{result.name:20} {state}: {result.failed}/{result.total} failed, recovery {recovery}, "
        f"longest gap {result.gap_ms:,.0f} ms, {result.wrong} wrong, {result.leaked} leaked "
        f"({seconds:.0f} s)",
        flush=True,
    )
    for violation in result.violations[:8]:
        print(f"    {violation}", flush=True)
    sys.stdout.flush()

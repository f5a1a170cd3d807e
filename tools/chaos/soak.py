"""Injects random faults for a long time and measures what grows.

    python tools/chaos/soak.py --minutes 60 --seed 7       # make soak MINUTES=60 SEED=7

Between faults the system becomes idle, and what its processes hold is measured: memory, file
descriptors, threads, pages, metric series. In the first third of the time, faults follow each
other at once. After that they come two minutes apart under load, without crowds of clients, and
faults replace runners only: the measured processes live long enough to separate growth from warm-up
and from what Ray keeps of each dead actor (dead_actors.py). malloc is set to keep neither what
threads freed (tcache, up to 230 KiB per thread, which fills for an hour) nor free memory at the
ends of its heaps, so that growth is in use. Exits with 1 if a promise was broken, or if something
significantly grows by more than one percent per hour within the lives of its processes (in runs of
over half an hour; shorter ones only report). ``--cases`` limits the faults.
"""

import argparse
import json
import os
import random
import sys
import time
import traceback
from dataclasses import replace

from cases import ONE, TWO, Case, all_cases
from growth import LONG_ENOUGH, MAX_GROWTH, Growth, held_by
from results import Result
from run import chosen, parser, run_child
from session import Session, print_result

KINDS = ("ingress", "engine", "scheduler", "runner", "proxy", "controller")
WARM_UP = 360.0  # seconds of a life before the first measurement that counts
CALM = 100.0  # seconds of load after a fault, once faults are rare
PAGES = 1024
"""Pages of an engine's cache: few, so that its index soon reaches its full size, also after a
runner's death, which empties it."""

KEEP_LITTLE = "glibc.malloc.tcache_count=0:glibc.malloc.trim_threshold=131072"
CROWDS = ("herd", "slow-readers", "disconnects", "runner-hangs")
"""Cases with hundreds of clients at once. Memory that they needed is not returned to the system, so
each starts a new life of all processes."""

REPLACES = (
    "controller", "scale", "scheduler", "scheduler-two", "scheduler-zombie", "supervisor", "update"
)  # fmt: skip
"""Cases that end measured processes other than runners."""


def main() -> int:
    options = soak_parser().parse_args()
    if not options.child:
        print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
        layout = replace(TWO if options.two else ONE, pages=PAGES)
        arguments = [*sys.argv[1:], "--seed", str(options.seed)]
        wait = 60 * options.minutes + 900
        os.environ.setdefault("GLIBC_TUNABLES", KEEP_LITTLE)
        return run_child(__file__, arguments, layout, wait)
    return soak(options)


def soak_parser() -> argparse.ArgumentParser:
    options = parser()
    options.description = __doc__
    options.add_argument("--two", action="store_true", help="run two engines")
    options.add_argument("--samples", help="file for the measurements, as JSON lines")
    return options


def soak(options: argparse.Namespace) -> int:
    """Runs the soak, in a process with the cluster's environment."""
    layout = TWO if options.two else ONE
    draw, growth = random.Random(options.seed), Growth(skip=WARM_UP)
    session = Session(replace(layout, pages=PAGES), options.child, options.seed, options.streams)
    wanted = chosen(all_cases(), options.cases)
    fits = [
        case for case in wanted if replace(case.layout, spare=0) == layout
    ]  # no room for a spare engine
    cases = [case for case in fits if usable(case)]
    gentle = [case for case in cases if case.name not in CROWDS + REPLACES] or cases
    wild = time.monotonic() + 20 * options.minutes
    end, broken, count, crowds = time.monotonic() + 60 * options.minutes, 0, 0, 0
    try:
        while (now := time.monotonic()) < end:
            case = draw.choice(cases if now < wild else gentle)
            if now >= wild:
                case = replace(case, after=CALM)
            session.seed = draw.getrandbits(31)
            started = time.monotonic()
            result = attempt(session, case)
            count += 1
            broken += not result.held
            print_result(result, time.monotonic() - started)
            if session.cluster is None:
                continue
            try:
                values = measured(session)
            except Exception:  # skip this sample; the next case reports what is wrong
                traceback.print_exc()
                continue
            pids = {kind: session.cluster.pids(kind) for kind in KINDS}
            crowds += case.name in CROWDS
            lives = {kind: (crowds, *pids[kind]) for kind in KINDS}
            growth.add(time.monotonic(), values, lives)
            if options.samples:
                note(options.samples, case, values, pids)
    finally:
        session.close()
    lines, grown = growth.lines(MAX_GROWTH)
    print("\n".join([f"{count} faults, {broken} broke the promise (seed {options.seed})", *lines]))
    counts = options.minutes >= LONG_ENOUGH
    return int(bool(broken or (counts and grown)))


def attempt(session: Session, case: Case) -> Result:
    """Runs one case. If it raises, it is broken, and the next one gets a new cluster."""
    try:
        return session.run(case)
    except Exception as error:
        traceback.print_exc()
        session.close()
        result = Result(case.name, case.row, case.fault)
        result.violations.append(f"{type(error).__name__}: {error}")
        return result


def note(path: str, case: Case, values: dict[str, float], pids: dict[str, list[int]]) -> None:
    """Appends a measurement and the process ids to a file."""
    line = {"at": time.monotonic(), "case": case.name, "values": values, "pids": pids}
    with open(path, "a") as file:
        print(json.dumps(line), file=file)


def usable(case: Case) -> bool:
    """Whether the cluster survives the case."""
    return not case.renews and not case.long


def measured(session: Session) -> dict[str, float]:
    """Returns what the idle system holds, by kind of process."""
    cluster = session.cluster
    assert cluster is not None
    figures: dict[str, float] = {}
    for kind in KINDS:
        held = held_by(cluster.pids(kind))
        figures |= {f"{kind} {name}": value for name, value in held.items()}
    stats = cluster.stats()
    figures["pages held"] = float(sum(each.pages_held for each in stats))
    figures["metric series"] = float(len(cluster.samples()))
    return figures


if __name__ == "__main__":
    sys.exit(main())

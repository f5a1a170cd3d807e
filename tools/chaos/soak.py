"""Faults at random for as long as you like, and what grows meanwhile.

    python tools/chaos/soak.py --minutes 60 --seed 7       # make soak MINUTES=60 SEED=7

Between faults the system comes to rest, and what its processes hold is measured: memory, file
descriptors, threads, pages, series of metrics. In the first third of the time one fault follows
another. After that they come two minutes apart under load, no crowds come, and the only processes
that faults replace are runners: what is measured lives for long enough to tell what grows from what
warms up, and from what Ray keeps of each actor that has died (dead_actors.py). malloc keeps a
little of what each thread gave back (tcache, up to 230 KiB, which fill for an hour), and at its
heaps' ends what the largest burst so far took; here it keeps neither, so that what grows is
somebody's. Exits with 1 when a promise was broken or when something surely grows by more than a
percent an hour within the lives of its processes (runs of over half an hour; shorter ones only
tell). ``--cases``: only these.
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
from growth import LONG_ENOUGH, MOST, Growth, held_by
from results import Result
from run import chosen, parser, run_child
from session import Session, tell

KINDS = ("ingress", "engine", "scheduler", "runner", "proxy", "controller")
WARM_UP = 360.0  # seconds of a life before the first measurement that counts
CALM = 100.0  # seconds that the load goes on for after a fault, once faults are rare
PAGES = 1024
"""Of an engine's cache: so few that its index is soon as large as it gets, and again after a
runner's death, which empties it."""

KEEP_LITTLE = "glibc.malloc.tcache_count=0:glibc.malloc.trim_threshold=131072"
CROWDS = ("herd", "slow-readers", "disconnects", "runner-hangs")
"""Cases with hundreds of clients at once: memory that was needed once is not given back to the
system, so the lives of processes are counted anew from there."""

REPLACES = (
    "controller", "scale", "scheduler", "scheduler-two", "scheduler-zombie", "supervisor", "update"
)  # fmt: skip
"""Cases that end processes which are measured, runners aside."""


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
    own = parser()
    own.description = __doc__
    own.add_argument("--two", action="store_true", help="two engines")
    own.add_argument(
        "--samples", help="file for what is measured after each case, as lines of JSON"
    )
    return own


def soak(options: argparse.Namespace) -> int:
    """The run itself, in a process with its cluster's environment."""
    layout = TWO if options.two else ONE
    draw, growth = random.Random(options.seed), Growth(skip=WARM_UP)
    session = Session(replace(layout, pages=PAGES), options.child, options.seed, options.streams)
    wanted = chosen(all_cases(), options.cases)
    fits = [case for case in wanted if replace(case.layout, spare=0) == layout]  # none has room
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
            tell(result, time.monotonic() - started)
            if session.cluster is None:
                continue
            try:
                values = measured(session)
            except Exception:  # this sample is missing; the next case finds what is wrong
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
    lines, grown = growth.lines(MOST)
    print("\n".join([f"{count} faults, {broken} broke the promise (seed {options.seed})", *lines]))
    counts = options.minutes >= LONG_ENOUGH
    return int(bool(broken or (counts and grown)))


def attempt(session: Session, case: Case) -> Result:
    """One case; what it raises breaks it, and the next one has a fresh cluster."""
    try:
        return session.run(case)
    except Exception as error:
        traceback.print_exc()
        session.close()
        result = Result(case.name, case.row, case.fault)
        result.violations.append(f"{type(error).__name__}: {error}")
        return result


def note(path: str, case: Case, values: dict[str, float], pids: dict[str, list[int]]) -> None:
    """One measurement into a file, with the ids of the processes."""
    line = {"at": time.monotonic(), "case": case.name, "values": values, "pids": pids}
    with open(path, "a") as file:
        print(json.dumps(line), file=file)


def usable(case: Case) -> bool:
    """Faults after which the same cluster goes on."""
    return not case.renews and not case.long


def measured(session: Session) -> dict[str, float]:
    """What the system holds at rest, by kind of process."""
    cluster = session.cluster
    assert cluster is not None
    found: dict[str, float] = {}
    for kind in KINDS:
        held = held_by(cluster.pids(kind))
        found |= {f"{kind} {name}": value for name, value in held.items()}
    stats = cluster.stats()
    found["pages held"] = float(sum(each.pages_held for each in stats))
    found["metric series"] = float(len(cluster.samples()))
    return found


if __name__ == "__main__":
    sys.exit(main())

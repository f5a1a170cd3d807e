"""Faults at random for as long as you like, and what grows meanwhile.

    python tests/chaos/soak.py --minutes 60 --seed 7       # make soak MINUTES=60 SEED=7

Between faults the system comes to rest, and what its processes hold is measured: memory, file
descriptors, threads, pages, series of metrics. Exits with 1 when a promise was broken or when
something grows by more than a percent an hour (runs of over half an hour; shorter ones only tell).
"""

import argparse
import random
import sys
import time

from cases import ONE, TWO, Case, all_cases
from growth import Growth, held_by
from run import parser, run_child
from session import Session, tell

KINDS = ("ingress", "engine", "scheduler", "runner", "proxy", "controller")
MOST = 0.01  # an hour
LONG_ENOUGH = 30.0  # minutes: a shorter run's slopes are of noise
WARM_UP = 3  # cases before the first measurement that counts


def main() -> int:
    options = soak_parser().parse_args()
    if not options.child:
        print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
        layout = TWO if options.two else ONE
        arguments = [*sys.argv[1:], "--seed", str(options.seed)]
        wait = 60 * options.minutes + 900
        return run_child(__file__, arguments, layout, wait)
    return soak(options)


def soak_parser() -> argparse.ArgumentParser:
    own = parser()
    own.description = __doc__
    own.add_argument("--two", action="store_true", help="two engines")
    return own


def soak(options: argparse.Namespace) -> int:
    """The run itself, in a process with its cluster's environment."""
    layout = TWO if options.two else ONE
    draw, growth = random.Random(options.seed), Growth(skip=WARM_UP)
    session = Session(layout, options.child, options.seed, options.streams)
    cases = [case for case in all_cases() if case.layout == layout and usable(case)]
    end, broken, count = time.monotonic() + 60 * options.minutes, 0, 0
    try:
        while time.monotonic() < end:
            case = draw.choice(cases)
            session.seed = draw.getrandbits(31)
            started = time.monotonic()
            result = session.run(case)
            count += 1
            broken += not result.held
            tell(result, time.monotonic() - started)
            if session.cluster is not None:
                growth.add(time.monotonic(), measured(session))
    finally:
        session.close()
    lines, grown = growth.lines(MOST)
    print("\n".join([f"{count} faults, {broken} broke the promise (seed {options.seed})", *lines]))
    counts = options.minutes >= LONG_ENOUGH
    return int(bool(broken or (counts and grown)))


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

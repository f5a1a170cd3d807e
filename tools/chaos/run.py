"""Injects every fault of the fault matrix into a running Rayfin and checks every stream.

    python tools/chaos/run.py                          # all cases: make chaos
    python tools/chaos/run.py --cases runner-decode    # some of them
    python tools/chaos/run.py --cases headline-two --minutes 10 --streams 32

Exits with 1 if a promise was broken. ``--write`` writes the rows to docs/reliability.md.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from cases import Case, all_cases
from cluster import Layout, environment
from report import write
from results import Result

START_SECONDS = 240  # for a cluster to start on a slow machine
CASE_SECONDS = 180  # for a case, beyond its length
OPTIONS = ("seed", "streams", "minutes")


def main() -> int:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends what it started
    cases = chosen(all_cases(options.minutes), options.cases)
    if options.child:
        import session

        session.main(cases, options.child, options.seed, options.streams, options.results)
        return 0
    print(f"seed {options.seed}: {len(cases)} cases", flush=True)
    results: list[Result] = []
    try:
        for layout in dict.fromkeys(case.layout for case in cases):
            group = [case for case in cases if case.layout == layout]
            run_apart(layout, group, options, results)
    finally:  # also if the run is interrupted
        if options.write:
            write(results, [case.name for case in all_cases()], circumstances())
    broken = [result.name for result in results if result.violations]
    skipped = [result.name for result in results if result.skipped]
    held = len(results) - len(broken) - len(skipped)
    print(f"{held} held, {len(broken)} broken {broken}, {len(skipped)} not run {skipped}")
    return 1 if broken else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Inject faults into a running Rayfin and check all streams."
    )
    parser.add_argument("--cases", default="", help="comma-separated names of cases (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the headline cases")
    parser.add_argument("--streams", type=int, help="number of open streams (default: the case's)")
    parser.add_argument(
        "--write", action="store_true", help="write the rows to docs/reliability.md"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    return parser


def chosen(cases: list[Case], names: str) -> list[Case]:
    """Returns the named cases, or all if no name is given."""
    wanted = list(filter(None, names.split(",")))
    known = {case.name: case for case in cases}
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"unknown cases: {sorted(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in wanted] or cases


def run_apart(
    layout: Layout, cases: list[Case], options: argparse.Namespace, results: list[Result]
) -> None:
    """Runs the cases of one layout in a separate process, which Ray's failures may kill.

    Adds to ``results``, also if it is interrupted.
    """
    with tempfile.NamedTemporaryFile("r", prefix="rc-") as file:
        arguments = ["--cases", ",".join(case.name for case in cases), "--results", file.name]
        for name in OPTIONS:
            if (value := getattr(options, name)) is not None:
                arguments += [f"--{name}", str(value)]
        longest = sum(CASE_SECONDS + 60 * options.minutes * case.long for case in cases)
        try:
            run_child(__file__, arguments, layout, START_SECONDS * len(cases) + longest)
        finally:
            finished = [Result(**json.loads(line)) for line in file]
            results += finished
    for case in cases[len(finished) :]:
        results.append(Result(case.name, case.row, case.fault, seed=options.seed))
        results[-1].violations.append("the run died")


def run_child(program: str, arguments: list[str], layout: Layout, seconds: float) -> int:
    """Runs ``program`` with --child in a layout's environment and returns its exit status.

    It and all that it started are killed after ``seconds``, or when this process ends.
    """
    folder = tempfile.mkdtemp(prefix="rc-")
    child = subprocess.Popen(
        [sys.executable, program, *arguments, "--child", folder],
        env=environment(layout, folder),
        start_new_session=True,
    )
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        print("timed out; killing it", flush=True)
        return 1
    finally:
        end_all(child.pid, folder)
        child.wait()
        shutil.rmtree(folder, ignore_errors=True)


def end_all(session: int, folder: str) -> None:
    """Kills the processes of a session and those started with its folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            belongs = f"RAY_TMPDIR={folder}".encode() in (entry / "environ").read_bytes()
            if belongs or os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended, or belongs to another user
            continue


def circumstances() -> str:
    """Describes the machine and the versions of the table."""
    return (
        f"Rayfin {version('rayfin')} with Ray {version('ray')} on {os.cpu_count()} CPUs; *load*: "
        "of that machine (runnable processes, mean of the last minute), where other work went on."
    )


if __name__ == "__main__":
    sys.exit(main())

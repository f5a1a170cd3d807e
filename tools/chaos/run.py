"""Breaks a running Rayfin in every way of the fault matrix, and holds every stream to the oracle.

    python tools/chaos/run.py                          # all cases: make chaos
    python tools/chaos/run.py --cases runner-decode    # some of them
    python tools/chaos/run.py --cases headline-two --minutes 10 --streams 32

Exits with 1 when a promise was broken. ``--write`` puts the rows into docs/reliability.md.
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

START_SECONDS = 240  # that a cluster may take on a slow machine ...
CASE_SECONDS = 180  # ... and a case beside its own length
OPTIONS = ("seed", "streams", "minutes")


def main() -> int:
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started goes with it
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
    finally:  # of a run that is stopped, what it has found out
        if options.write:
            write(results, [case.name for case in all_cases()], circumstances())
    broken = [result.name for result in results if result.violations]
    skipped = [result.name for result in results if result.skipped]
    held = len(results) - len(broken) - len(skipped)
    print(f"{held} held, {len(broken)} broken {broken}, {len(skipped)} not run {skipped}")
    return 1 if broken else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Faults in a running Rayfin, and a checker.")
    parser.add_argument("--cases", default="", help="names, with commas (default: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the headline cases")
    parser.add_argument("--streams", type=int, help="open at all times (default: the case's own)")
    parser.add_argument("--write", action="store_true", help="rows into docs/reliability.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    return parser


def chosen(cases: list[Case], names: str) -> list[Case]:
    """The cases of a list of names; all but the long ones if there is none."""
    wanted = list(filter(None, names.split(",")))
    known = {case.name: case for case in cases}
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"no such case: {sorted(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in wanted] or cases


def run_apart(
    layout: Layout, cases: list[Case], options: argparse.Namespace, results: list[Result]
) -> None:
    """Cases of one layout in a process of their own, which Ray may take down with itself.

    Adds to ``results``, also when it is stopped half-way.
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
            told = [Result(**json.loads(line)) for line in file]
            results += told
    for case in cases[len(told) :]:
        results.append(Result(case.name, case.row, case.fault, seed=options.seed))
        results[-1].violations.append("the run died")


def run_child(program: str, arguments: list[str], layout: Layout, seconds: float) -> int:
    """``program`` again, with --child and the environment of a layout; its exit status.

    After so many seconds, and at this process' own end, it is killed with all that it started.
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
        print("it did not end, and is killed", flush=True)
        return 1
    finally:
        end_all(child.pid, folder)
        child.wait()
        shutil.rmtree(folder, ignore_errors=True)


def end_all(session: int, folder: str) -> None:
    """Kills what is left of a session, and what was started with its folder, by their ids."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            ours = f"RAY_TMPDIR={folder}".encode() in (entry / "environ").read_bytes()
            if ours or os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except OSError:  # it has ended, or is not ours to look at
            continue


def circumstances() -> str:
    """What the table was made on, for those who compare."""
    return (
        f"Rayfin {version('rayfin')} with Ray {version('ray')} on {os.cpu_count()} CPUs; *load*: "
        "of that machine (runnable processes, mean of the last minute), where other work went on."
    )


if __name__ == "__main__":
    sys.exit(main())

"""Measures how long a start takes until the first token, and what an idle server costs.

    python benchmarks/start.py [--shape 135m] [--rounds 3] [--idle 60] [--peer NAME=SRC]
                               [--folder DIR]

A start is a new process: ``inline`` imports ``LLM``, loads the model and generates one token;
``server`` is ``rayfin serve`` until a request that is sent again and again gets its first token.
Weights are random ones of a size in shapes.py. Each round starts with a warm ``--weights-cache``,
and with ``--cold`` without one, too. A ``--peer`` is the ``src`` folder of another tree of Rayfin;
it takes turns with this one. Each start is a line, so that a run that is cut short says something.
``--idle`` then counts the processor time of each process of an idle server.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from server import PATIENCE, RAYFIN, free_ports

SETTLE = 20.0  # seconds after the first token, until a server counts as idle
TICKS = os.sysconf("SC_CLK_TCK")
INLINE = (
    "import json, sys; from rayfin import LLM, SamplingParams; settings = json.loads(sys.argv[1]); "
    "LLM(**settings).generate('Hello', SamplingParams(max_tokens=1), use_tqdm=False)"
)


def settings_of(model: str, cache: str | None) -> dict[str, str | int]:
    settings: dict[str, str | int] = {
        "model": model,
        "max_model_len": 2048,
        "kv_cache_memory": 1 << 28,
    }
    return settings if cache is None else settings | {"weights_cache": cache}


def environment(source: Path, folder: str) -> dict[str, str]:
    variables = {**os.environ, "PYTHONPATH": str(source), "RAY_TMPDIR": folder}
    variables["RAYFIN_WEIGHTS_CACHE"] = "off"  # what a start's settings do not name
    variables.pop("RAY_ADDRESS", None)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    return variables


def inline(source: Path, settings: dict[str, str | int]) -> tuple[float, float]:
    """Seconds of a program that generates a token, and those of processors."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [sys.executable, "-c", INLINE, json.dumps(settings)]
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        done = subprocess.run(
            command, env=environment(source, folder), capture_output=True, text=True
        )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, spent


@contextmanager
def server(source: Path, settings: dict[str, str | int]) -> Iterator[tuple[int, float]]:
    """A server that has given its first token; its process, and the seconds that it took."""
    (port,) = free_ports(1)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "serve.log"
        with log.open("w") as output:
            started = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-c", RAYFIN, "serve", "--port", str(port), *flags],
                env=environment(source, folder),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _first_token(f"http://127.0.0.1:{port}/v1/completions", process, log)
            yield process.pid, time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


def _first_token(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    with httpx.Client(timeout=PATIENCE) as http:
        while True:
            with suppress(httpx.TransportError):
                if http.post(url, json={"prompt": "Hello", "max_tokens": 1}).status_code == 200:
                    return
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)


def processor_seconds(root: int) -> dict[tuple[int, str], float]:
    """Processor time of a process and all below it, by id and name."""
    parents, times = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid = int(path.parent.name)
            fields = path.read_text().rpartition(")")[2].split()
            words = (path.parent / "cmdline").read_text().replace("\0", " ").split()
            parents[pid] = int(fields[1])
            times[pid] = ((int(fields[11]) + int(fields[12])) / TICKS, _short(words))
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {(pid, times[pid][1]): times[pid][0] for pid in sorted(below & times.keys())}


def _short(words: list[str]) -> str:
    """A process by the name that Ray gives it, or by its program."""
    if words and words[0].startswith("ray::"):
        return words[0]
    named = [Path(word).name for word in words if word.endswith((".py", "_server", "raylet"))]
    return named[0] if named else " ".join(words[:3])[:40]


def idle(root: int, seconds: float) -> None:
    """Prints the share of a core that each process takes while nothing happens."""
    time.sleep(SETTLE)
    before = processor_seconds(root)
    time.sleep(seconds)
    after = processor_seconds(root)
    # By id alone: Ray renames a process by what it does.
    then = {pid: spent for (pid, _), spent in before.items()}
    shares = {
        (pid, name): (spent - then.get(pid, 0.0)) / seconds for (pid, name), spent in after.items()
    }
    print("\n| process | share of a core, % | seconds since it began |\n| --- | --- | --- |")
    for (pid, name), share in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"| {name} | {100 * share:.2f} | {after[pid, name]:.1f} |")
    print(f"| all {len(shares)} | {100 * sum(shares.values()):.1f} | {sum(after.values()):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="135m", help="a size of shapes.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["inline", "server"], help="inline, server")
    parser.add_argument("--cold", action="store_true", help="without a weight cache too")
    parser.add_argument("--idle", type=float, default=0, help="seconds to watch an idle server")
    parser.add_argument("--peer", action="append", default=[], help="NAME=SRC of another tree")
    parser.add_argument("--folder", help="keeps the model and the packed weights for other runs")
    options = parser.parse_args()
    trees = {"this": Path(__file__).resolve().parents[1] / "src"}
    trees |= {name: Path(path) for name, path in (peer.split("=", 1) for peer in options.peer)}
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as temporary:
        folder = Path(options.folder or temporary)
        model = str(model_in(folder, options.shape))
        warm = {name: str(folder / f"weights-{name}") for name in trees}
        for name, source in trees.items():
            first, _ = inline(source, settings_of(model, warm[name]))  # fills the cache
            print(f"{name}: first start, {first:.1f} s", flush=True)
        results = Found()
        try:
            measure(options, trees, model, warm, results)
        finally:  # what is known, if a run is cut short
            results.show()
        if options.idle:
            for name, source in trees.items():
                with server(source, settings_of(model, warm[name])) as (pid, _):
                    print(f"\n{name}:")
                    idle(pid, options.idle)


def model_in(folder: Path, shape: str) -> Path:
    """A model of this shape in the folder, made if it is not there."""
    path = folder / f"model-{shape}"
    if not (path / "tokenizer.json").exists():
        import engines  # imports torch

        engines.make_model(path, shape, "float32")
    return path


class Found:
    """Seconds, and processor seconds, of the starts so far."""

    def __init__(self) -> None:
        self._starts = defaultdict[tuple[str, str, str], list[tuple[float, float]]](list)

    def add(self, kind: tuple[str, str, str], seconds: float, processor: float) -> None:
        self._starts[kind].append((seconds, processor))
        print(f"{' '.join(kind)}: {seconds:.1f} s, {processor:.1f} of processors", flush=True)

    def show(self) -> None:
        print("\n| start | weights | tree | s: median | all | processor s: median |")
        print("| --- | --- | --- | --- | --- | --- |")
        for (start, kind, name), each in sorted(self._starts.items()):
            shown = ", ".join(f"{seconds:.1f}" for seconds, _ in each)
            seconds, processor = (statistics.median(column) for column in zip(*each, strict=True))
            print(f"| {start} | {kind} | {name} | {seconds:.1f} | {shown} | {processor:.1f} |")


def measure(
    options: argparse.Namespace,
    trees: dict[str, Path],
    model: str,
    warm: dict[str, str],
    results: Found,
) -> None:
    """Starts of each kind, in turns of the trees."""
    for turn in range(options.rounds):
        for name, source in list(trees.items())[:: 1 if turn % 2 else -1]:
            for cache in (warm[name], None) if options.cold else (warm[name],):
                kind = "warm" if cache else "cold"
                settings = settings_of(model, cache)
                if "inline" in options.only:
                    results.add(("inline", kind, name), *inline(source, settings))
                if "server" in options.only:
                    with server(source, settings) as (pid, seconds):
                        spent = sum(processor_seconds(pid).values())
                        results.add(("server", kind, name), seconds, spent)


if __name__ == "__main__":
    main()

"""Benchmarks of the core; writes docs/benchmarks/core.md with its plots.

    python benchmarks/core.py [--vllm-python PATH]       # make bench-core VLLM_PYTHON=PATH
    python benchmarks/core.py --only scheduler           # one section, printed

Plots need the extra "bench". vLLM is compared if its environment is given.
"""

import argparse
import os
import platform
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import core_executors
import core_preemption
import core_prefix
import core_scheduler
import core_versions
from core_clock import EIGHT_BILLION
from core_report import Report, number

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"


def machine() -> str:
    """Describes the machine."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{os.cpu_count()} cores of {name}, {platform.system()} ({platform.machine()})"


def introduction(report: Report) -> None:
    report.heading("Benchmarks of the core", 1)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "ray"))
    report.text(f"""Made by `make bench-core` (`python benchmarks/core.py`), which writes this page
        anew; one section is printed by `python benchmarks/core.py --only NAME`, with NAME one of
        {", ".join(f"`{name}`" for name in sections(None))}. Machine: {machine()}. Python
        {platform.python_version()}, {libraries}.""")
    time = EIGHT_BILLION
    report.text(f"""Sections that say *virtual clock* run the real scheduler, queues and cache
        against a formula instead of a model, so their figures are exact and the same everywhere: a
        step takes {number(1e3 * time.step)} ms, {number(1e6 * time.token)} us for each token that
        it computes, {number(1e6 * time.kv_token)} us for each token whose keys and values it
        reads, and {number(1e6 * time.move)} us for each page that it moves to host memory or back.
        That is about an 8-billion-parameter model in 16 bits on one H200. The other sections are
        measured, and move with what else the machine does.""")


def sections(vllm_python: str | None) -> dict[str, Callable[[Report], None]]:
    """The function that writes each section, by the name for ``--only``."""
    return {
        "scheduler": partial(core_scheduler.write, vllm_python=vllm_python),
        "versions": core_versions.write,
        "prefix": core_prefix.write,
        "preemption": core_preemption.write,
        "executors": core_executors.write,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=list(sections(None)), help="print one section")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of core.md")
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("VLLM_PYTHON") or None,
        help="the Python of an environment with vLLM; default: $VLLM_PYTHON",
    )
    options = parser.parse_args()
    writers = sections(options.vllm_python)
    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            report = Report(Path(folder), draw=False)
            writers[options.only](report)
        print(report.markdown)
        return
    report = Report(options.folder)
    introduction(report)
    for name, write in writers.items():
        print(f"{name} ...", flush=True)
        write(report)
    path = options.folder / "core.md"
    path.write_text(report.markdown)
    print(path)


if __name__ == "__main__":
    main()

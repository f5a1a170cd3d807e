"""Compares Rayfin with other engines on the same model and jobs, in turns.

    python benchmarks/engines.py --peer vllm_cpu=/opt/vllm/bin/python [--only W1 W2] [--rounds 3]
    python benchmarks/engines.py --weights bfloat16 ...     # as in most published checkpoints
    python benchmarks/engines.py --weights gptq ...         # 4 bits, groups of 128
    python benchmarks/engines.py --shape 0.6b --only W1 W2 ...

Writes docs/benchmarks/engines.md, or engines_bf16.md, engines_0.6b.md. Rayfin runs under this
Python; a peer is a script of peers/ with the Python of its environment (compare.py
--help). With other settings Rayfin can be a peer: --peer int8:rayfin_engine=PYTHON,threads=2,...
"""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from core_report import Report
from quantized import quantise
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from turns import PEERS, PeerSpec, medians, take_turns

import rayfin.deployments.demo
from rayfin.deployments.bench.measures import Figures, Timeline, figures
from rayfin.deployments.bench.report import median
from rayfin.deployments.bench.workload import (
    Job,
    Lengths,
    arrivals,
    arriving,
    random_jobs,
    shared_prefix_jobs,
)

PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"
OURS = "rayfin"
VOCABULARY = 2000
TITLES = {
    "135m": "The 135M Llama shape",
    "0.6b": "The shape of Qwen3-0.6B",
    "hybrid": "A hybrid of gated delta rule and attention",
    "mixture": "A mixture of 32 experts, 4 of them for a token",
}
BATCH = {"135m": 64, "0.6b": 16, "hybrid": 32, "mixture": 32}
"""Number of requests of W1, about a minute's work."""


def batch(count: int) -> list[Job]:
    """W1: everything at once."""
    return random_jobs(count, Lengths(50, 400), Lengths(20, 120), vocabulary=VOCABULARY)


def one_stream() -> list[Job]:
    """W2: a single stream."""
    return random_jobs(1, Lengths(128, 128), Lengths(128, 128), vocabulary=VOCABULARY)


def interference() -> list[Job]:
    """W3: 8 streams, and two long prompts that arrive while they run."""
    streams = random_jobs(8, Lengths(64, 64), Lengths(160, 160), vocabulary=VOCABULARY)
    long = random_jobs(2, Lengths(3000, 3000), Lengths(8, 8), vocabulary=VOCABULARY, seed=1)
    return [*streams, *(replace(job, arrival=1.0) for job in long)]


def shared_prefix() -> list[Job]:
    """W4: 32 requests that begin with the same 1,000 tokens."""
    tail, output = Lengths(20, 60), Lengths(20, 60)
    return shared_prefix_jobs(32, 1000, tail, output, vocabulary=VOCABULARY)


WORKLOADS: dict[str, tuple[str, Callable[[], list[Job]]]] = {
    "W2": ("one stream, 128 tokens in, 128 out", one_stream),
    "W3": ("8 streams while two prompts of 3,000 tokens arrive", interference),
    "W4": ("32 requests that share a prefix of 1,000 tokens", shared_prefix),
}


def poisson(throughput: Sequence[Figures]) -> list[Job]:
    """W5: 60 requests like W1's that arrive at half of Rayfin's saturation rate."""
    rate = median([run.requests_per_second for run in throughput]) / 2
    jobs = random_jobs(60, Lengths(50, 400), Lengths(20, 120), vocabulary=VOCABULARY, seed=2)
    return arriving(jobs, arrivals(60, rate, seed=2))


def make_model(folder: Path, shape: str, weights: str) -> None:
    """Saves random fp32 weights that ``weights`` can represent, with the demo's tokenizer."""
    torch.manual_seed(0)
    architecture, sizes = SHAPES[shape]
    common = {"max_position_embeddings": 4096, "tie_word_embeddings": True}
    config = AutoConfig.for_model(architecture, **{**common, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if weights != "float32":
        model.to(torch.bfloat16).to(torch.float32)
    model.save_pretrained(folder)
    if weights == "gptq":
        quantise(folder)
    (demo,) = rayfin.deployments.demo.__path__
    AutoTokenizer.from_pretrained(Path(demo) / "model").save_pretrained(folder)


def table(runs: Mapping[str, Sequence[Sequence[Timeline]]]) -> list[list[str]]:
    """A row for each engine: medians over its rounds, and Rayfin's divided by them."""
    rows = []
    for rounds in runs.values():
        results = [figures(timelines) for timelines in rounds]
        failed = sum(run.failed for run in results)
        assert not failed, f"{failed} requests failed: {results[0].errors}"
        rows.append(medians(results))
    first = rows[0]
    return [
        [
            name,
            *(f"{value:.1f}" for value in row),
            *(f"{first[column] / max(row[column], 1e-9):.2f}" for column in (0, 2, 3, 4)),
        ]
        for name, row in zip(runs, rows, strict=True)
    ]


NAMES = ["W1", *WORKLOADS, "W5"]
HEADER = (
    "engine",
    "output tokens/s",
    "TTFT p50, ms",
    "TTFT p99, ms",
    "TPOT p50, ms",
    "ITL p99, ms",
    "Rayfin / it: tokens/s",
    "TTFT p99",
    "TPOT",
    "ITL p99",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], help="[LABEL:]NAME=PYTHON,key=value")
    parser.add_argument("--settings", default="threads=2", help="settings of Rayfin: key=value,...")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=TITLES, default="135m")
    parser.add_argument("--weights", choices=["float32", "bfloat16", "gptq"], default="float32")
    parser.add_argument("--page", type=Path, help="page to write; default: the one in docs/")
    options = parser.parse_args()
    if "W5" in options.only and "W1" not in options.only:
        parser.error("--only: W5 needs W1, whose throughput sets its rate")
    ours = f"{OURS}:rayfin_engine={sys.executable},max_model_len=4096,{options.settings}"
    specs = [PeerSpec.parse(text, PEERS) for text in (ours, *options.peer)]
    page = options.page or PAGES / page_name(options.shape, options.weights)
    report = Report(page.parent, draw=False)
    report.heading("Engines on one CPU", 1)
    versions: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"model-{options.shape}"
        make_model(model, options.shape, options.weights)
        sections = measured(options, specs, model, versions.append)
    kinds = {"float32": "", "bfloat16": ", all of them exact in bf16", "gptq": " in GPTQ's 4 bits"}
    exact = kinds[options.weights]
    report.text(
        f"{TITLES[options.shape]} with random weights{exact}, computed in fp32, "
        f"{os.cpu_count()} cores of a {processor()}; greedy, outputs to their full length; medians "
        f"of {options.rounds} rounds in which the engines took turns, each on tokens that no cache "
        "has seen. The last columns divide our figure by theirs."
    )
    report.code(
        f"python benchmarks/engines.py --shape {options.shape} --weights {options.weights} "
        + f"--rounds {options.rounds} --only {' '.join(options.only)}"
        + " --peer ..." * len(options.peer)
    )
    report.table(["engine"], [[line] for line in sorted({v.rsplit(",", 1)[0] for v in versions})])
    for title, rows in sections:
        report.heading(title)
        report.table(HEADER, rows)
    page.write_text(report.markdown)


def measured(
    options: argparse.Namespace,
    specs: Sequence[PeerSpec],
    model: Path,
    report: Callable[[str], object],
) -> list[tuple[str, list[list[str]]]]:
    """Runs the workloads; returns a title and a table for each."""
    count = BATCH[options.shape]
    saturated: list[Figures] = []
    kinds = {
        "W1": (f"{count} requests at once, prompts 50-400, outputs 20-120", lambda: batch(count)),
        **WORKLOADS,
        "W5": ("60 Poisson arrivals at half of saturation", lambda: poisson(saturated)),
    }
    sections = []
    for name in options.only:
        title, jobs = kinds[name]
        runs = take_turns(specs, model, jobs(), options.rounds, report)
        if name == "W1":
            saturated += [figures(run) for run in runs[OURS]]
        sections.append((f"{name}: {title}", table(runs)))
        print(name, *(" ".join(row) for row in sections[-1][1]), sep="\n", flush=True)
    return sections


def page_name(shape: str, weights: str) -> str:
    """The name of the page for a model."""
    parts = ["engines"]
    parts += [shape] if shape != "135m" else []
    parts += {"float32": [], "bfloat16": ["bf16"], "gptq": ["gptq"]}[weights]
    return "_".join(parts) + ".md"


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()

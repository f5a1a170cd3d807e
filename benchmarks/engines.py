"""Rayfin and other engines on the same model and the same jobs, taking turns.

    python benchmarks/engines.py --peer vllm_cpu=/opt/vllm/bin/python [--only W1 W2] [--rounds 3]

Writes docs/benchmarks/engines.md. Rayfin runs under this Python; a peer is a script of peers/ and
the Python of its own environment (``rayfin bench compare --help``).
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from core_report import Report
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rayfin.deployments.demo
from rayfin.deployments.bench.measures import Figures, Timeline, figures
from rayfin.deployments.bench.peers import PeerSpec
from rayfin.deployments.bench.report import median
from rayfin.deployments.bench.rounds import take_turns
from rayfin.deployments.bench.workload import (
    Job,
    Lengths,
    arrivals,
    arriving,
    random_jobs,
    shared_prefix_jobs,
)

PEERS = Path(__file__).with_name("peers")
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "engines.md"
OURS = "rayfin"
VOCABULARY = 2000
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def batch() -> list[Job]:
    """W1: everything at once."""
    return random_jobs(64, Lengths(50, 400), Lengths(20, 120), vocabulary=VOCABULARY)


def one_stream() -> list[Job]:
    """W2: nothing beside it."""
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
    "W1": ("64 requests at once, prompts 50-400, outputs 20-120", batch),
    "W2": ("one stream, 128 tokens in, 128 out", one_stream),
    "W3": ("8 streams while two prompts of 3,000 tokens arrive", interference),
    "W4": ("32 requests that share a prefix of 1,000 tokens", shared_prefix),
}


def poisson(throughput: Sequence[Figures]) -> list[Job]:
    """W5: 60 requests of W1's kind, arriving at half of our own saturation."""
    rate = median([own.requests_per_second for own in throughput]) / 2
    jobs = random_jobs(60, Lengths(50, 400), Lengths(20, 120), vocabulary=VOCABULARY, seed=2)
    return arriving(jobs, arrivals(60, rate, seed=2))


def make_model(folder: Path) -> None:
    """The 135M Llama shape with random weights in fp32, and the demo model's tokenizer."""
    torch.manual_seed(0)
    make_config: Any = LlamaConfig  # transformers leaves its constructor without types
    LlamaForCausalLM(make_config(**SHAPE)).save_pretrained(folder)
    (demo,) = rayfin.deployments.demo.__path__
    AutoTokenizer.from_pretrained(Path(demo) / "model").save_pretrained(folder)


def table(runs: Mapping[str, Sequence[Sequence[Timeline]]]) -> list[list[str]]:
    """A row for each engine: medians over its rounds, and ours / theirs."""
    rows = []
    for rounds in runs.values():
        own = [figures(timelines) for timelines in rounds]
        failed = sum(run.failed for run in own)
        assert not failed, f"{failed} requests failed: {own[0].errors}"
        rows.append(
            [
                median([run.output_per_second for run in own]),
                *(
                    1000 * median([getattr(getattr(run, kind), point) or 0.0 for run in own])
                    for kind, point in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"))
                ),
                1000 * median([run.itl.p99 or 0.0 for run in own]),
            ]
        )
    first = rows[0][0]
    return [
        [name, *(f"{value:.1f}" for value in row), f"{first / row[0]:.2f}"]
        for name, row in zip(runs, rows, strict=True)
    ]


HEADER = (
    "engine",
    "output tokens/s",
    "TTFT p50, ms",
    "TTFT p99, ms",
    "TPOT p50, ms",
    "ITL p99, ms",
    "Rayfin / it",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], help="[LABEL:]NAME=PYTHON,key=value")
    parser.add_argument("--settings", default="threads=2", help="of Rayfin: key=value,...")
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, "W5"], default=[*WORKLOADS, "W5"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if "W5" in options.only and "W1" not in options.only:
        parser.error("--only: W5 arrives at half of what W1 measures, so it needs W1")
    ours = f"{OURS}:rayfin_engine={sys.executable},max_model_len=4096,{options.settings}"
    specs = [PeerSpec.parse(text, PEERS) for text in (ours, *options.peer)]
    report = Report(options.page.parent, draw=False)
    report.heading("Engines on one CPU", 1)
    versions: list[str] = []
    saturated: list[Figures] = []
    sections: list[tuple[str, list[list[str]]]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "llama-135m"
        make_model(model)
        for name in options.only:
            title, jobs = WORKLOADS.get(name, ("60 Poisson arrivals at half of saturation", list))
            work = jobs() if name in WORKLOADS else poisson(saturated)
            runs = take_turns(specs, model, work, options.rounds, versions.append)
            if name == "W1":
                saturated = [figures(own) for own in runs[OURS]]
            sections.append((f"{name}: {title}", table(runs)))
            print(*(" ".join(row) for row in sections[-1][1]), sep="\n", flush=True)
    report.text(
        f"The 135M Llama shape with random weights, fp32, {torch.get_num_threads()} cores of a "
        f"{processor()}; greedy, outputs to their full length; medians of {options.rounds} rounds "
        "in which the engines took turns, each on tokens that no cache has seen."
    )
    report.code(
        f"python benchmarks/engines.py --rounds {options.rounds}"
        + " --peer ..." * len(options.peer)
    )
    report.table(["engine"], [[line] for line in sorted({v.rsplit(",", 1)[0] for v in versions})])
    for title, rows in sections:
        report.heading(title)
        report.table(HEADER, rows)
    options.page.write_text(report.markdown)


def processor() -> str:
    """The processor's name, as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()

"""``rayfin bench``: measures throughput and latency, offline, over HTTP and of other engines."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.cli.group import Commands
from rayfin.deployments.cli.options import (
    SectionedCommand,
    build,
    field_options,
    server_options,
)

if TYPE_CHECKING:
    from rayfin.deployments.bench.measures import Figures, Timeline
    from rayfin.deployments.bench.workload import Job

DATASETS = ("random", "shared-prefix", "lengths", "trace")
EXECUTOR = click.option(
    "--executor",
    type=click.Choice(["inline", "ray"]),
    default="inline",
    show_default=True,
    help="run the engine in this process (inline) or as Ray actors (ray)",
)
JSON = click.option(
    "--json",
    "json_file",
    type=click.File("w", lazy=False),
    help="write the results to FILE as JSON",
)
PLOT = click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="plot TTFT and ITL to FILE (needs matplotlib)",
)
ENGINE = field_options(EngineArgs, seed={"flag": "dummy-seed"})


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that ``_jobs`` reads."""
    options = [
        click.option("--dataset", type=click.Choice(DATASETS), default="random", show_default=True),
        click.option("--requests", type=click.IntRange(1), default=64, show_default=True),
        click.option("--prompt-tokens", default="50-400", show_default=True, help="N or LOW-HIGH"),
        click.option("--output-tokens", default="20-120", show_default=True, help="N or LOW-HIGH"),
        click.option("--prefix-tokens", type=click.IntRange(1), default=1000, show_default=True),
        click.option("--prefixes", type=click.IntRange(1), default=1, show_default=True),
        click.option(
            "--dataset-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="CSV of prompt,output lengths (lengths) or JSON lines (trace)",
        ),
        click.option("--vocabulary", type=click.IntRange(2), default=1000, show_default=True),
        click.option("--seed", type=int, default=0, show_default=True, help="seed of the dataset"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(cls=Commands)
def bench() -> None:
    """Measure throughput and latency.

    TTFT is the time to the first token, TPOT the mean time per later token, ITL the time between
    two tokens, E2E the time to the last. Decoding is greedy and ignores end-of-sequence tokens.
    """


@bench.command(cls=SectionedCommand)
@dataset_options
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@EXECUTOR
@JSON
@PLOT
@ENGINE
def throughput(
    rounds: int, executor: str, json_file: IO[str] | None, plot: Path | None, **settings: Any
) -> int:
    """Measure offline throughput: all requests of a dataset at once.

    Each round uses other tokens, so that the prefix cache does not help. One uncounted round warms
    up.

    \b
    Example:
      rayfin bench throughput --model ./my-model --requests 64 --executor ray
    """
    from rayfin.deployments.bench.offline import run_offline
    from rayfin.deployments.bench.workload import varied

    jobs = _jobs(settings)
    with _Engine(executor) as engine:
        runs = [run_offline(engine, varied(jobs, number)) for number in range(rounds + 1)][1:]
    return _report("throughput", runs, json_file, plot)


@bench.command(cls=SectionedCommand)
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--output-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--vocabulary", type=click.IntRange(2), default=1000, show_default=True)
@EXECUTOR
@JSON
@PLOT
@ENGINE
def latency(
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    vocabulary: int,
    executor: str,
    json_file: IO[str] | None,
    plot: Path | None,
    **settings: Any,
) -> int:
    """Measure offline latency: one request at a time, with a new prompt in each round.

    \b
    Example:
      rayfin bench latency --model ./my-model --dtype bfloat16
    """
    from rayfin.deployments.bench.offline import run_offline
    from rayfin.deployments.bench.workload import Lengths, random_jobs

    prompts, outputs = Lengths(prompt_tokens, prompt_tokens), Lengths(output_tokens, output_tokens)
    jobs = random_jobs(rounds + 1, prompts, outputs, vocabulary=vocabulary)
    with _Engine(executor) as engine:
        runs = [run_offline(engine, [job]) for job in jobs][1:]
    return _report("latency", runs, json_file, plot)


@bench.command(name="serve", cls=SectionedCommand)
@server_options
@dataset_options
@click.option(
    "--request-rate",
    default="inf",
    show_default=True,
    help="requests per second; inf sends all at once",
)
@click.option(
    "--burstiness",
    default="1",
    show_default=True,
    help="burstiness of arrivals: 1 is a Poisson process, less is burstier, inf is a fixed rate",
)
@click.option(
    "--ramp-to",
    type=click.FloatRange(0, min_open=True),
    help="ramp the request rate linearly to this value",
)
@click.option(
    "--max-concurrency", type=click.IntRange(1), help="maximum number of concurrent requests"
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="METRIC:MS",
    help="a limit on ttft, tpot or e2el for goodput; may be repeated",
)
@JSON
@PLOT
def serve_bench(
    url: str,
    api_key: str | None,
    model: str | None,
    request_rate: str,
    burstiness: str,
    ramp_to: float | None,
    max_concurrency: int | None,
    goodput: tuple[str, ...],
    json_file: IO[str] | None,
    plot: Path | None,
    **settings: Any,
) -> int:
    """Measure online performance: send a dataset to any OpenAI-compatible server.

    \b
    Example:
      rayfin bench serve --request-rate 4 --requests 200 --goodput ttft:500 --goodput tpot:50
    """
    import asyncio

    import httpx

    from rayfin.deployments.bench.client import run_jobs
    from rayfin.deployments.bench.endpoint import client_settings, find_model
    from rayfin.deployments.bench.measures import parse_limits
    from rayfin.deployments.bench.workload import arrivals, arriving

    limits = parse_limits(goodput)
    jobs = _jobs(settings)
    if settings["dataset"] != "trace":  # a trace brings its times of arrival
        rate = _positive("request_rate", request_rate)
        shape = _positive("burstiness", burstiness)
        if ramp_to is not None and math.inf in (rate, ramp_to):
            raise InvalidConfig("ramp_to and request_rate must be finite", "ramp_to")
        times = arrivals(len(jobs), rate, burstiness=shape, ramp_to=ramp_to, seed=settings["seed"])
        jobs = arriving(jobs, times)
    connection = client_settings(url, api_key)
    with httpx.Client(**connection) as client:
        name = find_model(client, model)

    async def run() -> "list[Timeline]":
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(**connection, limits=unlimited) as client:
            return await run_jobs(client, name, jobs, max_concurrency=max_concurrency)

    return _report("serve", [asyncio.run(run())], json_file, plot, limits)


@bench.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@dataset_options
@click.option(
    "--peer",
    "peers",
    multiple=True,
    required=True,
    metavar="[LABEL:]NAME=PYTHON[,KEY=VALUE]...",
    help="a script in the peers folder, its Python, and its settings; the first is the baseline",
)
@click.option(
    "--peers-folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="benchmarks/peers",
    show_default=True,
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--request-rate", default="inf", show_default=True)
@JSON
def compare(
    model: Path,
    peers: tuple[str, ...],
    peers_folder: Path,
    rounds: int,
    request_rate: str,
    json_file: IO[str] | None,
    **settings: Any,
) -> int:
    """Compare engines on the same requests, in alternating rounds.

    MODEL is a local folder that every engine can load. Prints medians over the rounds and the
    first engine's throughput relative to each. One uncounted round warms up.

    \b
    Example:
      rayfin bench compare ./my-model --peer rayfin_engine=.venv/bin/python \\
          --peer vllm_cpu=/opt/vllm/bin/python,dtype=float32
    """
    from rayfin.deployments.bench.measures import figures
    from rayfin.deployments.bench.peers import PeerSpec, take_turns
    from rayfin.deployments.bench.report import comparison
    from rayfin.deployments.bench.workload import arrivals, arriving

    specs = [PeerSpec.parse(text, peers_folder) for text in peers]
    jobs = _jobs(settings)
    if settings["dataset"] != "trace":
        rate = _positive("request_rate", request_rate)
        jobs = arriving(jobs, arrivals(len(jobs), rate, seed=settings["seed"]))
    results = take_turns(specs, model, jobs, rounds, click.echo)
    runs = {name: [figures(run) for run in named] for name, named in results.items()}
    print("\n".join(comparison(f"{settings['dataset']}, {len(jobs)} requests", runs)))
    if json_file is not None:
        _write(json_file, {name: [run.as_json() for run in named] for name, named in runs.items()})
    return int(any(run.failed for named in runs.values() for run in named))


class _Engine:
    """The engine that the running command's flags describe, as a context manager."""

    def __init__(self, executor: str) -> None:
        self._executor = executor

    def __enter__(self) -> Any:
        from dataclasses import replace

        from rayfin.deployments.offline.engines import start_engine
        from rayfin.deployments.serve.preflight import check_model, model_path

        if not sys.stderr.isatty():
            from transformers.utils import logging

            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        args = build(EngineArgs)
        check_model(args, tokenizer=False)
        self._engine = start_engine(self._executor, replace(args, model=model_path(args.model)))
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def _jobs(settings: dict[str, Any]) -> "list[Job]":
    from rayfin.deployments.bench import workload

    common = {"vocabulary": settings["vocabulary"], "seed": settings["seed"]}
    count, file = settings["requests"], settings["dataset_file"]
    if settings["dataset"] in ("lengths", "trace"):
        if file is None:
            raise click.UsageError(f"--dataset {settings['dataset']} needs --dataset-file")
        read = (
            workload.jobs_of_trace if settings["dataset"] == "trace" else workload.jobs_of_lengths
        )
        jobs: list[Job] = read(file, **common)
        if not jobs:
            raise InvalidConfig(f"{file} contains no jobs", "dataset_file")
        return jobs
    prompt = workload.Lengths.parse(settings["prompt_tokens"], "prompt_tokens")
    output = workload.Lengths.parse(settings["output_tokens"], "output_tokens")
    if settings["dataset"] == "random":
        return workload.random_jobs(count, prompt, output, **common)
    prefix = settings["prefix_tokens"]
    prefixes = settings["prefixes"]
    return workload.shared_prefix_jobs(count, prefix, prompt, output, prefixes=prefixes, **common)


def _report(
    title: str,
    runs: "Sequence[Sequence[Timeline]]",
    json_file: IO[str] | None,
    plot: Path | None,
    limits: dict[str, float] | None = None,
) -> int:
    from rayfin.deployments.bench import report
    from rayfin.deployments.bench.measures import figures

    results: list[Figures] = [figures(run, limits) for run in runs]
    for number, result in enumerate(results, start=1):
        name = title if len(results) == 1 else f"{title} {number} of {len(results)}"
        print("\n".join(report.lines(name, result)))
    if len(results) > 1:
        median = report.median([result.output_per_second for result in results])
        print(f"median: {median:.1f} output tokens/s")
    if json_file is not None:
        _write(json_file, [result.as_json() for result in results])
    if plot is not None:
        report.plot(plot, [timeline for run in runs for timeline in run])
    return int(any(result.failed for result in results))


def _write(file: IO[str], value: object) -> None:
    json.dump(value, file, indent=2)
    file.write("\n")


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise InvalidConfig(f"{name} must be a positive number or inf, got {text!r}", name)
    return value

"""``rayfin bench``: measures throughput and latency, offline and over HTTP."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
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
    from rayfin.deployments.bench.client import OpenLoop
    from rayfin.deployments.bench.datasets import Dataset, Pace
    from rayfin.deployments.bench.measures import Figures, Timeline
    from rayfin.deployments.bench.workload import Job
    from rayfin.deployments.offline.engines import OfflineEngine

DATASETS = (
    *("random", "shared-prefix", "prefix_repetition", "lengths", "trace", "timed_trace"),
    *("burstgpt", "mooncake-conversation", "mooncake-toolagent", "mooncake-synthetic"),
)
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
MAX_MODEL_LEN = click.option(
    "--max-model-len",
    type=click.IntRange(2),
    show_default="as the model says",
    help="scale a trace down until its longest request has no more tokens",
)
ENGINE = field_options(EngineArgs, seed={"flag": "dummy-seed"})


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DATASET_OPTIONS = [
    click.option(
        "--dataset-name",
        "--dataset",
        "dataset",
        type=click.Choice(DATASETS),
        default="random",
        show_default=True,
        help="what is asked; burstgpt and mooncake-* need no file",
    ),
    click.option(
        "--requests",
        "--num-prompts",
        "requests",
        type=click.IntRange(1),
        show_default="64, or all of a file",
        help="number of requests",
    ),
    click.option(
        "--prompt-tokens",
        "--random-input-len",
        "--prefix-repetition-suffix-len",
        "prompt_tokens",
        default="50-400",
        show_default=True,
        help="N or LOW-HIGH",
    ),
    click.option(
        "--output-tokens",
        "--random-output-len",
        "--prefix-repetition-output-len",
        "output_tokens",
        default="20-120",
        show_default=True,
        help="N or LOW-HIGH",
    ),
    click.option(
        "--prefix-tokens",
        "--prefix-repetition-prefix-len",
        "prefix_tokens",
        type=click.IntRange(1),
        default=1000,
        show_default=True,
        help="tokens that prompts of prefix_repetition share",
    ),
    click.option(
        "--prefixes",
        "--prefix-repetition-num-prefixes",
        "prefixes",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="number of such prefixes",
    ),
    click.option(
        "--dataset-path",
        "--dataset-file",
        "dataset_file",
        type=_FILE,
        help="CSV of prompt,output lengths (lengths), or a trace",
    ),
    click.option(
        "--trace",
        type=_FILE,
        metavar="FILE",
        help="the same as --dataset-name trace --dataset-path FILE: Mooncake's JSON lines, "
        "BurstGPT's CSV, or lines of arrival, prompt_tokens, output_tokens",
    ),
    click.option(
        "--timed-trace-chunk-hash-size",
        "block_tokens",
        type=click.IntRange(1),
        default=512,
        show_default=True,
        help="tokens of a block of hash_ids",
    ),
    click.option(
        "--burstgpt-model",
        type=click.Choice(["ChatGPT", "GPT-4"]),
        help="calls of this model only  [default: all of a file, else ChatGPT]",
    ),
    click.option(
        "--burstgpt-log",
        type=click.Choice(["conversation", "api"]),
        help="calls of this kind only  [default: all of a file, else conversation]",
    ),
    click.option("--vocabulary", type=click.IntRange(2), default=1000, show_default=True),
    click.option("--seed", type=int, default=0, show_default=True, help="seed of the dataset"),
]


def dataset_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that ``_dataset`` reads. Other names are those of vLLM."""
    for option in reversed(DATASET_OPTIONS):
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
    from rayfin.deployments.bench.datasets import dataset_of, load
    from rayfin.deployments.bench.workload import varied

    settings = with_trace(settings)
    loaded = load(settings)  # a bad file is an error before an engine starts
    with _Engine(executor) as engine:
        dataset = dataset_of(loaded, settings, engine.info.max_model_len)
        if dataset.summary is not None:
            print(dataset.summary, flush=True)
        jobs = dataset.jobs
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
    from rayfin.deployments.bench.workload import Lengths, random_jobs

    prompts, outputs = Lengths(prompt_tokens, prompt_tokens), Lengths(output_tokens, output_tokens)
    jobs = random_jobs(rounds + 1, prompts, outputs, vocabulary=vocabulary)
    with _Engine(executor) as engine:
        runs = [run_offline(engine, [job]) for job in jobs][1:]
    return _report("latency", runs, json_file, plot)


@bench.command(name="serve", cls=SectionedCommand)
@server_options
@dataset_options
@MAX_MODEL_LEN
@click.option(
    "--request-rate",
    show_default="inf, or as a trace says",
    help="requests per second; inf sends all at once, and a trace keeps its bursts",
)
@click.option(
    "--trace-speed",
    help="let the times of a trace pass so many times as fast; inf sends all at once",
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
    "--ramp-up-strategy",
    type=click.Choice(["linear", "exponential"]),
    help="ramp the request rate from --ramp-up-start-rps to --ramp-up-end-rps",
)
@click.option("--ramp-up-start-rps", type=click.FloatRange(0, min_open=True))
@click.option("--ramp-up-end-rps", type=click.FloatRange(0, min_open=True))
@click.option(
    "--max-concurrency", type=click.IntRange(1), help="maximum number of concurrent requests"
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="METRIC:MS",
    help="a limit on ttft, tpot or e2el for goodput; may be repeated",
)
@click.option(
    "--find-rate",
    metavar="SHARE",
    help="find the highest request rate at which this share (0.9, 90%) is within --goodput",
)
@click.option(
    "--find-rate-runs",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="most runs of --find-rate",
)
@JSON
@PLOT
def serve_bench(
    url: str,
    api_key: str | None,
    model: str | None,
    max_model_len: int | None,
    max_concurrency: int | None,
    goodput: tuple[str, ...],
    find_rate: str | None,
    find_rate_runs: int,
    json_file: IO[str] | None,
    plot: Path | None,
    **settings: Any,
) -> int:
    """Measure online performance: send a dataset to any OpenAI-compatible server.

    Ctrl-C ends the run and reports the requests that were answered until then.

    \b
    Examples:
      rayfin bench serve --request-rate 4 --requests 200 --goodput ttft:500 --goodput tpot:50
      rayfin bench serve --dataset-name mooncake-conversation --trace-speed 2
      rayfin bench serve --trace calls.jsonl --goodput ttft:500 --find-rate 90%
    """
    import httpx

    from rayfin.deployments.bench.client import OpenLoop
    from rayfin.deployments.bench.datasets import dataset_of, load
    from rayfin.deployments.bench.endpoint import client_settings, context_length, find_model
    from rayfin.deployments.bench.measures import parse_limits
    from rayfin.deployments.bench.slo import parse_share
    from rayfin.deployments.bench.traces import Trace

    limits = parse_limits(goodput)
    share = None if find_rate is None else parse_share(find_rate)
    if share is not None and not limits:
        raise InvalidConfig("find_rate needs limits: --goodput ttft:500", "find_rate")
    if share is not None and plot is not None:
        raise InvalidConfig("plot shows one run, and --find-rate makes several", "plot")
    settings = with_trace(settings)
    pace = _pace(settings)
    loaded = load(settings)
    pace.check(isinstance(loaded, Trace) or loaded.timed)
    connection = client_settings(url, api_key)
    with httpx.Client(**connection) as client:
        name = find_model(client, model)
        max_model_len = max_model_len or context_length(client, name)
    dataset = dataset_of(loaded, settings, max_model_len)
    if dataset.summary is not None:
        print(dataset.summary, flush=True)
    sender = OpenLoop(connection, name, max_concurrency)
    if share is not None:
        return _search(sender, dataset, pace, limits, share, find_rate_runs, json_file)
    jobs = pace.jobs(dataset)
    try:
        run = sender.run(jobs)
    except KeyboardInterrupt:
        title = f"serve, interrupted at {len(sender.ended)} of {len(jobs)} requests"
        _report(title, [sender.ended], json_file, plot, limits)
        raise
    return _report("serve", [run], json_file, plot, limits)


@bench.command(name="agents", cls=SectionedCommand)
@server_options
@click.option(
    "--profile",
    type=click.Choice(["agentx", "agentx-tree", "small"]),
    default="agentx",
    show_default=True,
    help="how long sessions are: 40 turns of 142k tokens, the same with subagents, or 13 of 3k",
)
@click.option(
    "--scale", default="1", show_default=True, help="multiply all tokens by this, such as 1/32"
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="sessions of a file in place of --profile and --pauses: JSON lines with requests of "
    "t, in, out, think_time, as Weka's traces of coding agents",
)
@click.option("--agents", "count", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--sessions",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="of each agent, one after another",
)
@click.option(
    "--pauses",
    type=click.Choice(["mixed", "tools", "slow", "two", "human", "quick"]),
    default="mixed",
    show_default=True,
    help="time between an answer and the next turn: of tools and people, of tools, 120 s, "
    "1 s or 150 s, half of people, 1 s",
)
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the sessions")
@click.option(
    "--kill",
    multiple=True,
    metavar="ROLE@SECONDS",
    help="kill a scheduler, a runner or an engine so many seconds after the start; may be "
    "repeated; needs the server's Ray cluster (RAY_ADDRESS)",
)
@JSON
def agents(
    url: str,
    api_key: str | None,
    model: str | None,
    profile: str,
    scale: str,
    trace: Path | None,
    count: int,
    sessions: int,
    pauses: str,
    seed: int,
    kill: tuple[str, ...],
    json_file: IO[str] | None,
) -> int:
    """Measure sessions of agents: turns that go on from all before them, with pauses between.

    Each agent runs one session after another. The headline is how long a session takes. Answers
    that were under way at a --kill are asked for again after the run, and must be the same.

    \b
    Examples:
      rayfin bench agents --profile small --agents 8 --pauses tools
      rayfin bench agents --profile small --kill runner@20 --kill scheduler@40
    """
    import httpx

    from rayfin.deployments.bench.agents import PAUSES, PROFILES, AgentPlan, run_agents
    from rayfin.deployments.bench.endpoint import client_settings, context_length, find_model
    from rayfin.deployments.bench.kills import EngineKiller, Kills, read_kill
    from rayfin.deployments.bench.traces import read_sessions

    above, _, below = scale.partition("/")
    share = _positive("scale", above) / _positive("scale", below or "1")
    connection, kills = client_settings(url, api_key), [read_kill(each) for each in kill]
    with httpx.Client(**connection) as asking:
        name = find_model(asking, model)
        longest = context_length(asking, name)
    plan = AgentPlan(
        profile=PROFILES[profile],
        scripts=() if trace is None else read_sessions(trace, count * sessions),
        agents=count,
        sessions=sessions,
        pauses=PAUSES[pauses],
        scale=share,
        longest=None if longest is None else longest * 9 // 10,
        seed=seed,
    )
    killing = Kills(kills, EngineKiller()) if kills else None
    client = run_agents(connection, name, plan, killing)
    figures = asdict(client.figures()) | {"errors": client.errors}
    print("\n".join(client.figures().lines()))
    if killing is not None:
        print(client.killed_line(killing.struck))
        ends = {"failed": sorted(client.failed), "wrong": sorted(client.wrong)}
        figures |= {"killed": killing.struck, **ends}
    for error, times in client.errors.most_common(5):
        print(f"failed {times} x: {error}")
    if json_file is not None:
        _write(json_file, figures)
    return int(bool(client.errors or client.wrong))


class _Engine:
    """The engine that the running command's flags describe, as a context manager."""

    def __init__(self, executor: str) -> None:
        self._executor = executor

    def __enter__(self) -> Any:
        from rayfin.deployments.offline.engines import start_engine
        from rayfin.deployments.serve.preflight import check_model, model_path

        if not sys.stderr.isatty():
            from transformers.utils import logging

            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        args = build(EngineArgs)
        check_model(args, tokenizer=False)
        self._engine = start_engine(
            self._executor, replace(args, model=model_path(args.model, **args.hub))
        )
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def run_offline(engine: "OfflineEngine", jobs: "Sequence[Job]") -> "list[Timeline]":
    """Runs all jobs at once, greedily and to their full lengths; arrival times are ignored."""
    import numpy as np

    from rayfin.actors.messages import EngineRequest, Sampling, StopRules
    from rayfin.deployments.bench.measures import Timeline

    requests = [
        EngineRequest(
            f"bench-{key}",
            np.array(job.prompt, np.int32),
            Sampling(),
            StopRules(job.output_tokens),
            key=key,
        )
        for key, job in enumerate(jobs)
    ]
    start = time.perf_counter()
    timelines = [Timeline(start, len(job.prompt)) for job in jobs]
    for deltas in engine.run(requests):
        now = time.perf_counter()
        keys, counts = np.unique(deltas.keys, return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            timelines[key].add(now, count)
        for ended in deltas.ended:
            if ended.error is not None:
                timelines[ended.key].error = str(ended.error)
    return timelines


def with_trace(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with ``--trace`` written out."""
    trace = settings["trace"]
    if trace is None:
        return settings
    if settings["dataset_file"] is not None:
        raise click.UsageError("--trace and --dataset-path exclude each other")
    return settings | {"dataset": "trace", "dataset_file": trace}


def _pace(settings: dict[str, Any]) -> "Pace":
    """When requests are sent."""
    from rayfin.deployments.bench.datasets import Pace

    rate, speed = settings["request_rate"], settings["trace_speed"]
    ramp_to, strategy = settings["ramp_to"], settings["ramp_up_strategy"]
    ends = (settings["ramp_up_start_rps"], settings["ramp_up_end_rps"])
    given = None if rate is None else _positive("request_rate", rate)
    if strategy is None and ends != (None, None):
        raise click.UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    if strategy is not None:
        if None in ends or given is not None or ramp_to is not None:
            raise click.UsageError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and neither "
                "--request-rate nor --ramp-to"
            )
        given, ramp_to = ends
    return Pace(
        given,
        _positive("burstiness", settings["burstiness"]),
        ramp_to,
        strategy or "linear",
        None if speed is None else _positive("trace_speed", speed),
        settings["seed"],
    )


def _search(
    sender: "OpenLoop",
    dataset: "Dataset",
    pace: "Pace",
    limits: dict[str, float],
    share: float,
    runs: int,
    json_file: IO[str] | None,
) -> int:
    """Looks for the highest rate within the limits; prints what is known, after Ctrl-C too."""
    from rayfin.deployments.bench import report
    from rayfin.deployments.bench.slo import Probes, RateSearch

    if pace.ramp_to is not None or pace.speed is not None:
        raise InvalidConfig("find_rate sets the rate: no ramp and no --trace-speed", "find_rate")
    probes = Probes(
        sender,
        lambda rate: replace(pace, rate=rate).jobs(dataset),
        limits,
        RateSearch(share, runs),
        lambda line: print(line, flush=True),
    )
    try:
        probes.run(math.inf if pace.rate is None else pace.rate)
    finally:  # after Ctrl-C too
        if probes.best is not None:
            print("\n".join(report.lines("serve", probes.best)))
        print(probes.line())
        if json_file is not None:
            _write(json_file, probes.as_json())
    return int(probes.best is None)


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

"""The datasets of ``rayfin bench`` by name, and the times at which their jobs come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench import synthetic, traces, workload
from rayfin.deployments.bench.traces import Trace
from rayfin.deployments.bench.workload import Job, Ramp, arrivals, arriving

REQUESTS = 64  # of a dataset that has no number of its own
MOONCAKE = {f"mooncake-{name}": name for name in synthetic.MOONCAKE}
FILES = {"lengths": "a CSV file", "trace": "a trace", "timed_trace": "a trace in Mooncake's format"}


@dataclass(frozen=True, slots=True)
class Dataset:
    """The jobs of a run.

    Attributes:
        timed: the jobs have times of arrival of their own.
        summary: what a trace is like, in one line; None for other datasets.
    """

    jobs: list[Job]
    timed: bool = False
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """When jobs are sent.

    Attributes:
        rate: mean requests a second; None: a trace's own, all at once for others.
        speed: how many times as fast the times of a trace pass.
    """

    rate: float | None = None
    burstiness: float = 1.0
    ramp_to: float | None = None
    ramp: Ramp = "linear"
    speed: float | None = None
    seed: int = 0

    def check(self, timed: bool) -> None:
        """Raises:
        InvalidConfig: the settings do not go together.
        """
        if self.ramp_to is not None and inf in (self.rate or inf, self.ramp_to):
            raise InvalidConfig("ramp_to and request_rate must be finite", "ramp_to")
        if timed and self.ramp_to is not None:
            raise InvalidConfig("ramp_to needs a dataset that has no times", "ramp_to")
        if self.speed is not None and not timed:
            raise InvalidConfig("trace_speed needs a trace", "trace_speed")
        if self.speed is not None and self.rate is not None:
            raise InvalidConfig("trace_speed and request_rate exclude each other", "trace_speed")

    def jobs(self, dataset: Dataset) -> list[Job]:
        """The dataset's jobs with their times of arrival.

        Raises:
            InvalidConfig: a rate for a trace without times.
        """
        if not dataset.timed:
            times = arrivals(
                len(dataset.jobs),
                inf if self.rate is None else self.rate,
                burstiness=self.burstiness,
                ramp_to=self.ramp_to,
                ramp=self.ramp,
                seed=self.seed,
            )
            return arriving(dataset.jobs, times)
        if self.rate is not None:
            return at_rate(dataset.jobs, self.rate)
        return at_speed(dataset.jobs, self.speed or 1.0)


def load(settings: Mapping[str, Any]) -> Dataset | Trace:
    """What the options of ``rayfin bench`` describe: jobs, or a trace to make them from.

    Raises:
        InvalidConfig: a file or a value is malformed; the message names it.
    """
    name, file = settings["dataset"], settings["dataset_file"]
    if file is None and name in FILES:
        raise InvalidConfig(f"--dataset-name {name} needs {FILES[name]}", "dataset_file")
    trace = _trace(name, file, settings)
    if trace is not None:
        return trace
    drawn = {"vocabulary": settings["vocabulary"], "seed": settings["seed"]}
    if file is not None and name in FILES:
        read = workload.jobs_of_trace if name == "trace" else workload.jobs_of_lengths
        jobs = read(file, **drawn)[: settings["requests"]]
        if not jobs:
            raise InvalidConfig(f"{file} contains no jobs", "dataset_file")
        return Dataset(jobs, timed=name == "trace")
    if file is not None:
        raise InvalidConfig(f"--dataset-name {name} reads no file", "dataset_file")
    prompt = workload.Lengths.parse(settings["prompt_tokens"], "prompt_tokens")
    output = workload.Lengths.parse(settings["output_tokens"], "output_tokens")
    requests = settings["requests"] or REQUESTS
    if name == "random":
        return Dataset(workload.random_jobs(requests, prompt, output, **drawn))
    prefix, prefixes = settings["prefix_tokens"], settings["prefixes"]
    return Dataset(
        workload.shared_prefix_jobs(requests, prefix, prompt, output, prefixes=prefixes, **drawn)
    )


def dataset_of(
    loaded: Dataset | Trace, settings: Mapping[str, Any], max_model_len: int | None
) -> Dataset:
    """The jobs of what ``load`` gave; a trace is scaled down to ``max_model_len``, if known.

    Raises:
        InvalidConfig: a trace cannot be scaled so far.
    """
    if isinstance(loaded, Dataset):
        return loaded
    fitted = loaded if max_model_len is None else loaded.fitted(max_model_len)
    scaled = ""
    if fitted is not loaded:
        factor = fitted.block_tokens / loaded.block_tokens
        scaled = f" (lengths x {factor:.3f}, to fit {max_model_len})"
    summary = (
        f"{settings['dataset']}: {len(fitted.calls)} requests in {fitted.calls[-1].arrival:.1f} s"
        f" · prompts of {fitted.mean_prompt:.0f} tokens, answers of {fitted.mean_output:.0f}"
        f"{scaled} · {fitted.hit_ratio:.1%} of prompt tokens repeat earlier ones"
    )
    jobs = fitted.jobs(vocabulary=settings["vocabulary"], seed=settings["seed"])
    return Dataset(jobs, timed=True, summary=summary)


def at_speed(jobs: Sequence[Job], speed: float) -> list[Job]:
    """The jobs at times that pass ``speed`` times as fast; infinity sends all at once."""
    return [replace(job, arrival=job.arrival / speed) for job in jobs]


def at_rate(jobs: Sequence[Job], rate: float) -> list[Job]:
    """The jobs with their bursts, at a mean of ``rate`` requests a second.

    Raises:
        InvalidConfig: all come at once, so no speed gives them a rate.
    """
    span = jobs[-1].arrival - jobs[0].arrival
    if rate == inf:
        return at_speed(jobs, inf)
    if not span:
        raise InvalidConfig("request_rate needs a trace whose calls differ in time", "request_rate")
    return at_speed(jobs, rate * span / (len(jobs) - 1))


def _trace(name: str, file: Path | None, settings: Mapping[str, Any]) -> Trace | None:
    """The trace of a dataset that is one; None for those in Rayfin's own format too."""
    requests, seed = settings["requests"], settings["seed"]
    model, log = settings["burstgpt_model"], settings["burstgpt_log"]
    if file is not None and name in ("burstgpt", "trace", "timed_trace"):
        if name == "burstgpt" or (name == "trace" and traces.is_burst_file(file)):
            return traces.read_burst(file, traces.BurstFilter(model, log), requests)
        if name == "timed_trace" or traces.is_mooncake_file(file):
            return traces.read_mooncake(file, settings["block_tokens"], requests)
    elif file is None and name in MOONCAKE:
        return synthetic.mooncake(MOONCAKE[name], requests or REQUESTS, seed=seed)
    elif file is None and name == "burstgpt":
        return synthetic.burst(
            requests or REQUESTS, model or "ChatGPT", log or "conversation", seed=seed
        )
    return None

"""Datasets by name, and the times at which their jobs come."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.datasets import Dataset, Pace, at_rate, dataset_of, load
from rayfin.deployments.bench.traces import Trace
from rayfin.deployments.bench.workload import Job

SETTINGS: dict[str, Any] = {
    "dataset": "random",
    "requests": None,
    "prompt_tokens": "5-9",
    "output_tokens": "2",
    "prefix_tokens": 8,
    "prefixes": 1,
    "dataset_file": None,
    "block_tokens": 512,
    "burstgpt_model": None,
    "burstgpt_log": None,
    "vocabulary": 50,
    "seed": 0,
}
JOBS = [Job((11, 12), 3, at) for at in (0.0, 1.0, 1.0, 6.0)]
MOONCAKE = '{"timestamp": 1000, "input_length": 600, "output_length": 8, "hash_ids": [1, 2]}\n'
BURST = "Timestamp,Model,Request tokens,Response tokens,Log Type\n1,GPT-4,9,3,API log\n"


def made(max_model_len: int | None = None, **settings: Any) -> Dataset:
    whole = SETTINGS | settings
    return dataset_of(load(whole), whole, max_model_len)


def test_drawn_datasets() -> None:
    assert len(made().jobs) == 64 and not made().timed
    assert len(made(requests=5).jobs) == 5
    shared = made(dataset="prefix_repetition", requests=3).jobs
    assert shared[0].prompt[:8] == shared[2].prompt[:8]
    assert made(dataset="shared-prefix", requests=3).jobs == shared


@pytest.mark.parametrize(
    "name", ["mooncake-conversation", "mooncake-toolagent", "mooncake-synthetic", "burstgpt"]
)
def test_made_traces_fit(name: str) -> None:
    dataset = made(500, dataset=name, requests=30)
    assert dataset.timed and len(dataset.jobs) == 30
    assert all(len(job.prompt) + job.output_tokens <= 500 for job in dataset.jobs)
    assert dataset.summary is not None and name in dataset.summary
    assert "to fit 500" in dataset.summary and "repeat earlier ones" in dataset.summary


def test_a_trace_is_known_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for text, prompt in (
        (MOONCAKE, 600),
        (BURST, 9),
        ('{"arrival": 1, "prompt_tokens": 7, "output_tokens": 1}', 7),
    ):
        file.write_text(text)
        dataset = made(dataset="trace", dataset_file=file)
        assert dataset.timed and [len(job.prompt) for job in dataset.jobs] == [prompt]
    file.write_text(MOONCAKE * 3)
    assert isinstance(load(SETTINGS | {"dataset": "timed_trace", "dataset_file": file}), Trace)
    assert len(made(dataset="timed_trace", dataset_file=file, requests=2).jobs) == 2
    file.write_text(BURST)
    assert len(made(dataset="burstgpt", dataset_file=file).jobs) == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dataset": "trace"}, "needs a trace"),
        ({"dataset": "timed_trace"}, "Mooncake"),
        ({"dataset": "random", "dataset_file": Path("x")}, "reads no file"),
        ({"dataset": "mooncake-synthetic", "dataset_file": Path("x")}, "reads no file"),
    ],
)
def test_files_where_they_belong(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        made(**settings)


def arrivals_of(pace: Pace, timed: bool = True) -> list[float]:
    return [job.arrival for job in pace.jobs(Dataset(JOBS, timed))]


def test_a_trace_keeps_its_bursts() -> None:
    assert arrivals_of(Pace()) == [0, 1, 1, 6]
    assert arrivals_of(Pace(speed=2)) == [0, 0.5, 0.5, 3]
    assert arrivals_of(Pace(speed=inf)) == arrivals_of(Pace(rate=inf)) == [0, 0, 0, 0]
    assert arrivals_of(Pace(rate=3)) == pytest.approx([0, 1 / 6, 1 / 6, 1])  # 3 gaps a second


def test_other_jobs_get_times() -> None:
    assert arrivals_of(Pace(), timed=False) == [0, 0, 0, 0]
    assert arrivals_of(Pace(2, burstiness=inf), timed=False) == [0, 0.5, 1, 1.5]
    ramp = arrivals_of(Pace(1, burstiness=inf, ramp_to=8, ramp="exponential"), timed=False)
    assert ramp == pytest.approx([0, 1, 1.5, 1.75])  # rates 1, 2, 4, 8


def test_a_trace_without_times_has_no_rate() -> None:
    with pytest.raises(InvalidConfig, match="request_rate"):
        at_rate([JOBS[0], JOBS[0]], 1.0)


@pytest.mark.parametrize(
    ("pace", "timed", "named"),
    [
        (lambda: Pace(ramp_to=2), False, "finite"),
        (lambda: Pace(rate=1, ramp_to=2), True, "ramp_to"),
        (lambda: Pace(speed=2), False, "trace_speed"),
        (lambda: Pace(rate=1, speed=2), True, "exclude"),
    ],
)
def test_settings_that_do_not_go_together(
    pace: Callable[[], Pace], timed: bool, named: str
) -> None:
    with pytest.raises(InvalidConfig, match=named):
        pace().check(timed)

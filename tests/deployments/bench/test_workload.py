"""Datasets and arrivals: repeatable, of the lengths asked for, and clear about bad files."""

import math
from pathlib import Path

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.workload import (
    Job,
    Lengths,
    arrivals,
    arriving,
    jobs_of_lengths,
    jobs_of_trace,
    random_jobs,
    shared_prefix_jobs,
    varied,
)


def test_random_jobs_are_repeatable_and_within_their_lengths() -> None:
    jobs = random_jobs(200, Lengths(5, 9), Lengths(2, 3), vocabulary=40)
    assert jobs == random_jobs(200, Lengths(5, 9), Lengths(2, 3), vocabulary=40)
    assert jobs != random_jobs(200, Lengths(5, 9), Lengths(2, 3), vocabulary=40, seed=1)
    assert {len(job.prompt) for job in jobs} == {5, 6, 7, 8, 9}
    assert {job.output_tokens for job in jobs} == {2, 3}
    assert all(0 <= token < 40 for job in jobs for token in job.prompt)


def test_shared_prefixes_take_turns() -> None:
    jobs = shared_prefix_jobs(6, 50, Lengths(4, 4), Lengths(1, 1), prefixes=2, vocabulary=99)
    heads = [job.prompt[:50] for job in jobs]
    assert heads[0] == heads[2] == heads[4] != heads[1] == heads[3]
    assert len({job.prompt for job in jobs}) == 6


def test_varied_jobs_keep_what_is_equal_and_differ_from_the_round_before() -> None:
    jobs = shared_prefix_jobs(4, 8, Lengths(4, 6), Lengths(1, 1), vocabulary=99)
    other = varied(jobs, 3)
    assert all(a != b for a, b in zip(jobs[0].prompt, other[0].prompt, strict=True))
    assert other[0].prompt[:8] == other[1].prompt[:8]
    assert [len(job.prompt) for job in other] == [len(job.prompt) for job in jobs]
    assert varied(jobs, 0) == jobs


@pytest.mark.parametrize("text", ["", "x", "0", "9-5", "-3", "1-2-3"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(InvalidConfig, match="prompt_tokens"):
        Lengths.parse(text, "prompt_tokens")


def test_lengths() -> None:
    assert Lengths.parse("7", "x") == Lengths(7, 7)
    assert Lengths.parse("50-400", "x") == Lengths(50, 400)


def test_a_file_of_lengths(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt,output\n12,3\n\n7,1\n")
    jobs = jobs_of_lengths(file, vocabulary=50)
    assert [(len(job.prompt), job.output_tokens) for job in jobs] == [(12, 3), (7, 1)]
    file.write_text("12,3\n7\n")
    with pytest.raises(InvalidConfig, match="line 2"):
        jobs_of_lengths(file, vocabulary=50)


def test_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"arrival": 2.5, "prompt_tokens": 3, "output_tokens": 4}\n'
        '{"arrival": 0.5, "prompt_tokens": [5, 6], "output_tokens": 1}\n'
    )
    jobs = jobs_of_trace(file, vocabulary=50)
    assert jobs[0] == Job((5, 6), 1, 0.5)
    assert (len(jobs[1].prompt), jobs[1].output_tokens, jobs[1].arrival) == (3, 4, 2.5)
    file.write_text('{"prompt_tokens": 3}\n')
    with pytest.raises(InvalidConfig, match="line 1"):
        jobs_of_trace(file, vocabulary=50)


def test_arrivals_have_their_rate_and_shape() -> None:
    assert arrivals(4, math.inf) == [0, 0, 0, 0]
    assert arrivals(4, 2.0, burstiness=math.inf) == [0, 0.5, 1.0, 1.5]
    poisson, bursty = (arrivals(4000, 10.0, burstiness=shape) for shape in (1.0, 0.2))
    for times in (poisson, bursty):
        assert times == sorted(times) and times[-1] == pytest.approx(400, rel=0.15)
    assert _variation(poisson) == pytest.approx(1, rel=0.15)
    assert _variation(bursty) == pytest.approx(5**0.5, rel=0.2)  # 1 / sqrt(shape)


def test_a_ramp_gets_faster() -> None:
    times = arrivals(101, 1.0, burstiness=math.inf, ramp_to=10.0)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert gaps[0] == 1.0 and gaps == sorted(gaps, reverse=True)
    assert gaps[-1] == pytest.approx(0.1, rel=0.05)


def _variation(times: list[float]) -> float:
    """Standard deviation of the gaps / their mean."""
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    return (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean


def test_arriving_jobs_keep_their_order() -> None:
    jobs = random_jobs(5, Lengths(2, 2), Lengths(2, 2), vocabulary=12)
    times = arrivals(5, 3.0)
    assert [job.arrival for job in arriving(jobs, times)] == times

"""The comparison of engines: its workloads, and the table that it makes of timelines."""

import pytest
from engines import HEADER, WORKLOADS, batch, page_name, poisson, table

from rayfin.deployments.bench.measures import Timeline, figures

QUICK = Timeline(0.0, 4, [(1.0, 1), (2.0, 1)])
SLOW = Timeline(0.0, 4, [(2.0, 1), (4.0, 1)])


def test_a_row_for_each_engine_and_ratios_to_the_first() -> None:
    ours, theirs = table({"ours": [[QUICK], [SLOW], [QUICK]], "theirs": [[SLOW]]})
    assert len(ours) == len(theirs) == len(HEADER)
    assert ours == ["ours", "1.0", "1000.0", "1000.0", "1000.0", "1000.0", *["1.00"] * 4]
    assert theirs == [
        "theirs",
        "0.5",
        "2000.0",
        "2000.0",
        "2000.0",
        "2000.0",
        "2.00",
        *["0.50"] * 3,
    ]


def test_a_failed_request_is_no_figure() -> None:
    with pytest.raises(AssertionError, match="gone"):
        table({"ours": [[QUICK, Timeline(0.0, 1, error="gone")]]})


def test_workloads_are_what_their_titles_say() -> None:
    jobs = {"W1": batch(64)} | {name: make() for name, (_, make) in WORKLOADS.items()}
    assert [len(own) for own in jobs.values()] == [64, 1, 10, 32]
    assert len({job.prompt[:1000] for job in jobs["W4"]}) == 1
    assert sorted(len(job.prompt) for job in jobs["W3"])[-2:] == [3000, 3000]
    assert all(job.arrival > 0 for job in jobs["W3"] if len(job.prompt) == 3000)
    arriving = poisson([figures([QUICK] * 4)])  # 2 a second: at 1 a second
    assert len(arriving) == 60 and 30 < arriving[-1].arrival < 120


def test_a_page_for_each_model() -> None:
    pages = [page_name(*own) for own in (("135m", "float32"), ("0.6b", "bfloat16"))]
    assert pages == ["engines.md", "engines_0.6b_bf16.md"]

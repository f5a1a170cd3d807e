"""The benchmark of images: its workloads, its table, and pictures in its peer's prompts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from images import (
    HEADER,
    OURS,
    SIZES,
    STREAMS,
    TEXT,
    Pictures,
    Workloads,
    make_model,
    measure,
    rows,
    verdicts,
)

from rayfin.deployments.bench.measures import Timeline
from rayfin.deployments.bench.workload import Job

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@dataclass
class Spec:
    name: str


class Fake:
    """An engine that takes a second for an image that is new, and one for each token."""

    def __init__(self, name: str, pace: float = 1.0) -> None:
        self.spec: Any = Spec(name)
        self.seen: set[int] = set()
        self.runs: list[list[Job]] = []
        self._pace = pace

    def run(self, jobs: Sequence[Job]) -> list[Timeline]:
        self.runs.append(list(jobs))
        timelines = []
        for job in jobs:
            new = {token for token in job.prompt if token < 0} - self.seen
            self.seen |= new
            first = job.arrival + self._pace * (1 + len(new))
            pieces = [(first + self._pace * at, 1) for at in range(job.output_tokens)]
            timelines.append(Timeline(job.arrival, 0, pieces))
        return timelines


@pytest.fixture
def work(tmp_path: Path) -> Workloads:
    return Workloads(Pictures(tmp_path, 32), 4, prompt=6, output=5, image_tokens=9)


def test_all_engines_get_the_same_jobs_and_every_image_is_new(work: Workloads) -> None:
    ours, theirs, text = Fake(OURS), Fake("theirs", 2.0), Fake(TEXT)
    peers: list[Any] = [ours, theirs, text]
    found = measure(peers, work, rounds=2)
    assert ours.runs == theirs.runs and len(text.runs) == 3
    assert text.runs == [run for run in ours.runs if len(run[0].prompt) == 6 + 9]
    shown = [token for run in ours.runs for job in run for token in job.prompt if token < 0]
    assert len(shown) - len(set(shown)) == 3  # of the second questions
    assert len(list(work.pictures.folder.glob("*.png"))) == len(set(shown))
    beside = [run for run in ours.runs if len(run) == 2 * STREAMS]
    assert len(beside) == 3
    for run in beside:
        arrivals = [job.arrival for job in run[STREAMS:]]
        assert 0 < min(arrivals) and max(arrivals) < 25  # of a stream of 25 tokens
        assert all(job.prompt[0] < 0 for job in run[STREAMS:])
    assert [len(own.batch) for own in found.values()] == [2, 2, 0]
    assert found[OURS].second == [1.0, 1.0] and found[OURS].first == [2.0, 2.0]


def test_a_row_for_each_engine_and_a_line_for_each_bar(work: Workloads) -> None:
    peers: list[Any] = [Fake(OURS), Fake("theirs", 2.0), Fake(TEXT)]
    found = measure(peers, work, rounds=1)
    ours, theirs, text = rows(found)
    assert {len(row) for row in (ours, theirs, text)} == {len(HEADER)}
    assert ours[2:8] == ["2000.0", "1000.0", "0.50", "1000.0", "1000.0", "1.00"]
    assert theirs[2:8] == ["4000.0", "2000.0", "0.50", "2000.0", "2000.0", "1.00"]
    assert text[1:8] == [""] * 7 and text[8] == ours[8]
    assert verdicts(found) == [
        "second / first: 0.50 (at most 0.25)",
        "text / that of a model of text alone: 1.00 (at least 0.98)",
        "tokens/s / theirs's: 2.00 (at least 1.3)",
        "beside / theirs's: 0.50 (at most 0.6)",
    ]


def test_a_failed_request_is_no_figure(work: Workloads) -> None:
    peer: Any = Fake(OURS)
    peer.run = lambda jobs: [Timeline(0.0, error="gone") for _ in jobs]
    with pytest.raises(AssertionError, match="gone"):
        measure([peer], work, rounds=1)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_our_peer_puts_pictures_into_prompts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(PEERS)])
    from rayfin_engine import Rayfin

    sizes = SIZES["tiny"]
    place = make_model(tmp_path / "model", family, sizes)
    pictures = Pictures(tmp_path, sizes.pixels)
    first, second = pictures.new(), pictures.new()
    settings = {"images": str(tmp_path), "image_place": place, "kv_cache_memory": 2**22}
    engine = Rayfin(str(tmp_path / "model"), {"threads": 1, **settings})
    assert engine._pictures is not None
    prompt = [5, -1 - first, 6, -1 - second, -1 - first]
    ids, images = engine._pictures.placed(prompt)
    assert (ids < 0).sum() == 3 * sizes.image_tokens and len(images) == 3
    assert len(ids) == 2 + 3 * (sizes.image_tokens + len(place) - 1)
    assert images[0].digest == images[2].digest != images[1].digest
    engine.add(0, prompt, 5)
    engine.add(1, [7, 8], 3)
    counts = {0: 0, 1: 0}
    while counts != {0: 5, 1: 3}:
        for index, count in engine.step():
            counts[index] += count

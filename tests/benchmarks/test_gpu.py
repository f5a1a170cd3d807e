"""The GPU's script at toy size, wherever it runs; its workload and what it counts as idle."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import hops
import pytest
from gpu_bench import Bench
from gpu_engine import busy_seconds, nano_trace
from gpu_paths import Paths


def test_workload_is_that_of_nano_vllm() -> None:
    """Its totals, on which the floor stands that docs/benchmarks/gpu.md tells."""
    trace = nano_trace()
    assert len(trace) == 256
    assert (sum(prompt for prompt, _ in trace), sum(out for _, out in trace)) == (142_827, 133_966)


def test_busy_is_what_any_span_covers() -> None:
    spans = [(60.0, 70.0), (0.0, 30.0), (25.0, 40.0), (28.0, 29.0), (85.0, 100.0)]
    assert busy_seconds(spans) == pytest.approx(40 + 10 + 15)
    assert busy_seconds([(0.0, 50.0), (50.0, 100.0)]) == pytest.approx(100)


def test_toy_sections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each row is in the file, and a section that fails takes no other along."""
    sections, out = "check,attention,matmul,prefill,graphs,idle,kernels", tmp_path / "rows.jsonl"
    arguments = ["--toy", "--out", str(out), "--sections", sections]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    kept: list[list[str]] = []

    def fails(bench: Bench) -> None:
        kept.append(out.read_text().splitlines())
        raise RuntimeError("killed")

    monkeypatch.setitem(gpu.SECTIONS, "graphs", fails)
    with pytest.raises(SystemExit, match="failed: graphs"):
        gpu.main()
    printed = capsys.readouterr().out
    titles = ("Check: att", "Check: greedy", "Attention of one", "Matrix products", "Prefill, 8B")
    assert all(f"## {title}" in printed for title in (*titles, "Idle device"))
    assert len(kept[0]) > 8
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for section in ("check", "attention", "matmul", "prefill", "idle"):
        own = [row for row in rows if row["section"] == section]
        assert own and all(
            f"| {value} |" in printed for row in own for value in row.values() if value != section
        )


def test_calls_are_sections_in_the_order_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu.md"
    for number, sections in gpu.CALLS.items():
        assert set(sections) <= set(gpu.SECTIONS)
        assert (
            f"| {number} | `--call {number}` | {', '.join(f'`{each}`' for each in sections)} |"
            in (page.read_text())
        )
    assert {each for sections in gpu.CALLS.values() for each in sections} == set(gpu.SECTIONS)


def test_the_host_of_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hops.py host", "--rows", "3"])
    monkeypatch.setattr(hops, "HOST_ROUNDS", 1)
    hops.host()
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| 3 |") and len(row.split("|")) == 6


def make_llm(*, graphs: bool, gpu_model: bool = True) -> Any:
    """What `Paths` looks at of an inline engine."""
    runner = SimpleNamespace(
        _forward=SimpleNamespace(run=lambda info, output: None),
        _graphs=SimpleNamespace(begin=lambda info, rules: None, queued=[]) if graphs else None,
        _loaded=SimpleNamespace(gpu_model=object() if gpu_model else None),
    )
    executor = SimpleNamespace(_runner=runner)
    inner = SimpleNamespace(_pipeline=SimpleNamespace(_executor=executor))
    return SimpleNamespace(_engine=SimpleNamespace(_engine=inner), runner=runner)


def test_another_path_than_the_named_one_is_not_timed() -> None:
    step = SimpleNamespace(ids=[0, 1], decoding_batch=2, num_steps=3)
    prompt = SimpleNamespace(ids=[0, 1], decoding_batch=1, num_steps=1)
    llm = make_llm(graphs=True)
    paths = Paths(llm)
    llm.runner._forward.run(prompt, None)
    with pytest.raises(AssertionError, match="left the graphs"):
        paths.expect(graphs=True)
    llm.runner._graphs.begin(step, None)
    with pytest.raises(AssertionError, match="waited for the host: 3 replayed .0 behind"):
        paths.expect(graphs=True)
    llm.runner._graphs.queued.append(step)
    llm.runner._graphs.begin(step, None)
    llm.runner._graphs.begin(step, None)
    paths.expect(graphs=True)
    with pytest.raises(AssertionError, match="should not"):
        paths.expect(graphs=False)
    llm.runner._forward.run(step, None)
    with pytest.raises(AssertionError, match="left the graphs: 9 replayed .6 behind others., 1"):
        paths.expect(graphs=True)
    eager = make_llm(graphs=False)
    paths = Paths(eager)
    eager.runner._forward.run(step, None)
    paths.expect(graphs=False)
    with pytest.raises(AssertionError, match="transformers' modules"):
        Paths(make_llm(graphs=True, gpu_model=False)).expect(graphs=True)

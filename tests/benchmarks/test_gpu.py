"""The GPU's script at toy size, wherever it runs; its workload and what it counts as idle."""

import sys

import gpu
import pytest
from gpu_engine import idle_share, nano_trace


def test_workload_is_that_of_nano_vllm() -> None:
    """Its totals, on which the floor stands that docs/benchmarks/gpu.md tells."""
    trace = nano_trace()
    assert len(trace) == 256
    assert (sum(prompt for prompt, _ in trace), sum(out for _, out in trace)) == (142_827, 133_966)


def test_idle_is_what_no_span_covers() -> None:
    """Of the window from 20 to 90: covered 20-40 (twice in part), 60-70, 85-90."""
    spans = [(60.0, 70.0), (0.0, 30.0), (25.0, 40.0), (28.0, 29.0), (85.0, 100.0)]
    assert idle_share(spans) == pytest.approx(1 - 35 / 70)
    assert idle_share([(0.0, 50.0), (50.0, 100.0)]) == pytest.approx(0)


def test_toy_sections(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sections = "check,attention,matmul,prefill,idle"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--toy", "--sections", sections])
    gpu.main()
    printed = capsys.readouterr().out
    titles = ("Check", "Attention of one", "Matrix products", "Prefill, 8B", "Idle device")
    assert all(f"## {title}" in printed for title in titles)

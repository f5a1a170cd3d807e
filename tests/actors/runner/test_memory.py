"""What is left for pages, with a GPU that only says how much memory is taken."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.actors.runner import checkpoint, model_runner
from rayfin.actors.runner.memory import available_bytes, bytes_taken
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.sampling import select as sampling_select

pytestmark = pytest.mark.slow(reason="profiles whole engines")

Make = Callable[..., Any]
GPU = torch.device("cuda")
TOTAL = 1000


class FakeGpu:
    """Memory as torch (peak, reserved) and the driver (free) tell it."""

    def __init__(self) -> None:
        self.peak = self.reserved = self.cached = self.others = 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return TOTAL - self.reserved - self.cached - self.others, TOTAL

    def empty_cache(self) -> None:
        self.cached = 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "mem_get_info", gpu.mem_get_info)
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gpu.reserved + gpu.cached)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu.peak)
    for nothing in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, nothing, lambda device: None)
    return gpu


def test_largest_step_leaves_its_own_pages(gpu: FakeGpu) -> None:
    """900 of 1000 bytes, less 50 of others, and a peak of 300 of which 80 were pages."""

    def run() -> int:
        gpu.peak, gpu.reserved, gpu.cached, gpu.others = 300, 200, 150, 50
        return 80

    assert available_bytes(run, GPU, 0.9) == 900 - 50 - (300 - 80)


def test_bytes_taken_are_those_that_stay(gpu: FakeGpu) -> None:
    """Neither what was cached before nor what making it leaves in the cache."""
    gpu.reserved, gpu.cached = 200, 100

    def make() -> object:
        gpu.reserved, gpu.cached, gpu.others = 230, 300, 7
        return object()

    assert bytes_taken(make, GPU) == 30 + 7
    assert gpu.cached == 0


def test_graphs_are_not_made_to_be_measured_on_a_cpu() -> None:
    assert bytes_taken(lambda: pytest.fail("made"), torch.device("cpu")) == 0


def test_graphs_are_not_pages(
    two_layers: Any, engine_args: Make, few_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded for the buckets and tables of the engine to come, and let go."""
    pytest.importorskip("triton")
    for module in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    made: list[Any] = []

    def measure(make: Callable[[], Any], device: torch.device) -> int:
        made.append(make())
        return 300

    monkeypatch.setattr(model_runner, "bytes_taken", measure)
    monkeypatch.setattr(model_runner, "available_bytes", lambda *args: 10_000)
    args = engine_args(
        two_layers.folder,
        kv_cache_memory=None,
        attention="triton",
        max_decoding_batch=2,
        max_model_len=30,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    runner = ModelRunner(args)
    facts, _ = runner.profile()
    assert facts.available_bytes == 10_000 - 300 and runner._graphs is None
    runner._args = replace(args, enforce_eager=True)
    runner.profile()
    graphs, none = made
    assert graphs._sizes == [1, 2] and graphs._state.tables.shape == (2, 8) and none is None

"""Recording on a CUDA that is not there: which streams graphs are captured on."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from rayfin.actors.runner.gpu.graphs import WARM_UPS, CudaRecorder


class FakeCuda:
    """Takes the place of what the recorder calls in ``torch.cuda``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[FakeStream] = []
        self.current: list[Any] = [FakeStream(self)]  # the last one is current
        self.captured: list[tuple[Any, Any, str]] = []  # stream, pool, error mode
        self.recording = False
        for name in ("graph_pool_handle", "current_stream", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream(self))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self) -> Any:
        return self.current[-1]

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.current.append(stream)
        yield
        self.current.pop()

    @contextmanager
    def graph(
        self,
        graph: Any,
        pool: Any = None,
        stream: Any = "torch's",
        capture_error_mode: str = "global",
    ) -> Any:
        self.captured.append((stream, pool, capture_error_mode))
        with self.stream(stream):
            yield


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        cuda.streams.append(self)

    def wait_stream(self, other: Any) -> None:
        pass


class FakeGraph:
    def replay(self) -> None:
        pass


def test_a_recorder_has_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """For its warm-ups and its captures, and no other recorder's: each keeps a workspace."""
    cuda = FakeCuda(monkeypatch)
    ran: list[Any] = []
    recorders = [CudaRecorder(), CudaRecorder()]
    for _ in range(3):
        for recorder in recorders:
            recorder(lambda: ran.append(cuda.current_stream()))
    assert len(ran) == 6 * (WARM_UPS + 1)
    assert len(set(map(id, ran))) == 2, "one for each recorder"
    assert len({id(stream) for stream, _, _ in cuda.captured}) == 2
    assert all(stream in ran for stream, _, _ in cuda.captured)
    assert len({id(pool) for _, pool, _ in cuda.captured}) == 2
    assert {mode for _, _, mode in cuda.captured} == {"thread_local"}

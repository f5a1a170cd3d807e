"""Which stream waits for which, with streams that only write down what is asked of them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rayfin.actors.runner import page_moves as copy_stream
from rayfin.actors.runner.page_moves import CopyStream


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.events: list[FakeEvent] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> "FakeEvent":
        self.events.append(FakeEvent(f"{self.name} {len(self.events)}"))
        return self.events[-1]

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append(f"{self.name} waits for event {event.name}")


class FakeEvent:
    def __init__(self, name: str) -> None:
        self.name = name
        self.happened = False

    def query(self) -> bool:
        return self.happened


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    streams: dict[str, Any] = {name: FakeStream(name, log) for name in ("compute", "side")}
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams["side"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["compute"])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(copy_stream, "MOST_UNDER_WAY", 100)
    return log


def test_out_follows_what_computes_and_in_comes_before_it(log: list[str]) -> None:
    copies = CopyStream(torch.device("cuda"))
    with copies.out(torch.zeros(10)):
        log.append("out")
    with copies.into():
        log.append("in")
    log.append("use")
    copies.used(torch.zeros(10))
    assert log == ["side waits for compute", "out", "in", "compute waits for side", "use"]


def test_tensors_under_way_are_bounded(log: list[str]) -> None:
    """Each of 40 bytes, 100 at a time: the owner of the oldest waits for its use, and only then."""
    copies = CopyStream(torch.device("cuda"))
    for _ in range(3):
        with copies.out(torch.zeros(10)):
            pass
        copies.used(torch.zeros(10))
    waits = [entry for entry in log if "event" in entry]
    assert waits == ["compute waits for event side 0", "side waits for event compute 0"]
    assert copies._out.bytes == copies._in.bytes == 80
    side: Any = copies._side
    for event in side.events:
        event.happened = True
    with copies.out(torch.zeros(10)):
        pass
    assert copies._out.bytes == 40 and len(log) == len([*waits, *["side waits for compute"] * 4])

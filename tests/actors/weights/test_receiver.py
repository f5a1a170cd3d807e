"""A trainer in another process broadcasts tensors; they become the version that is begun."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rayfin.actors.errors import EngineBusy, EngineUnavailable, InvalidRequest
from rayfin.actors.weights.begun import BegunUpdate
from rayfin.actors.weights.receiver import WeightReceiver
from rayfin.actors.weights.store import WeightStore

TRAINER = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=2)
for number in range(int(sys.argv[2])):
    dist.broadcast(torch.full((2, 3), float(number), dtype=torch.bfloat16), 0)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "app" / "engine")


@pytest.fixture
def trainer() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Its port, and itself: it sends three tensors, then waits."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    command = [sys.executable, "-c", TRAINER, str(port), "3"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    yield port, process
    process.kill()
    process.wait()


def test_tensors_of_a_group(
    store: WeightStore, trainer: tuple[int, subprocess.Popen[bytes]]
) -> None:
    port, process = trainer
    receiver = WeightReceiver(store, seconds=60.0)
    with pytest.raises(EngineBusy, match="no group"):
        receiver.begin()
    try:
        receiver.join("127.0.0.1", port, 1)
        with pytest.raises(EngineBusy, match="no update is begun"):
            receiver.receive(["x"], ["float32"], [[1]])
        receiver.begin()
        with pytest.raises(InvalidRequest, match="x is int8"):
            receiver.receive(["x"], ["int8"], [[1]])
        with pytest.raises(InvalidRequest, match="differ in length"):
            receiver.receive(["x"], [], [])
        receiver.receive(["module.a", "b"], ["bfloat16"] * 2, [[2, 3]] * 2)
        receiver.receive(["c"], ["bfloat16"], [[2, 3]])
        version = receiver.finish("step-1")
        assert BegunUpdate(store).of("step-1") == version
        read = load_file(version.place)
        for number, name in enumerate("abc"):
            assert torch.equal(read[name], torch.full((2, 3), float(number)).bfloat16())
        with pytest.raises(EngineBusy, match="is begun"):
            receiver.begin()
        BegunUpdate(store).abandon()
        receiver.begin()
        process.kill()  # a trainer that dies costs the group
        with pytest.raises(EngineUnavailable, match="does not send"):
            receiver.receive(["a"], ["float32"], [[1]])
        with pytest.raises(EngineBusy, match="no group"):
            receiver.begin()
        assert {path.name for path in store.folder.iterdir()} <= {"LOCK"}
    finally:
        receiver.leave()
    with pytest.raises(InvalidRequest, match="has no group"):
        WeightReceiver(store, seconds=0.5).join("127.0.0.1", 1, 1)

"""What a trainer sends is begun, then committed or abandoned; one at a time."""

import asyncio
import os
import pickle
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from rayfin.actors.errors import EngineBusy, EngineUnavailable, InvalidRequest
from rayfin.actors.weights import begun as module
from rayfin.actors.weights.begun import BegunUpdate
from rayfin.actors.weights.store import BEGUN, WeightStore

TENSORS = {"x": torch.arange(5.0), "y.weight": torch.ones(2, 3, dtype=torch.bfloat16)}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "app" / "engine")


async def pieces(content: bytes, size: int = 7) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def receive(begun: BegunUpdate, content: bytes, label: str = "a") -> Any:
    return asyncio.run(begun.receive(pieces(content), label))


def test_a_file_in_pieces(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    begun = BegunUpdate(store)
    with pytest.raises(EngineBusy, match="no update is begun"):
        begun.of()
    version = receive(begun, save(TENSORS))
    assert begun.of() == begun.of("a") == version and not list(store.folder.glob("*.part"))
    read = load_file(version.place)
    assert all(torch.equal(read[name], own) for name, own in TENSORS.items())
    for work in (lambda: receive(begun, save(TENSORS), "b"), lambda: begun.of("b")):
        with pytest.raises(EngineBusy, match=r"'a' is begun, since \d+ s"):
            work()
    store.drop()  # of another update
    assert Path(version.place).exists()
    begun.abandon()
    assert not list(store.folder.glob("*.safetensors"))
    receive(begun, save(TENSORS), "b")


def test_how_it_ends(store: WeightStore) -> None:
    begun = BegunUpdate(store)
    receive(begun, save(TENSORS))
    for error, stays in ((EngineUnavailable, True), (EngineBusy, True), (InvalidRequest, False)):
        with pytest.raises(error), begun.ended():
            raise error("no")
        assert (store.read(BEGUN) is not None) is stays
    receive(begun, save(TENSORS))
    with begun.ended():
        store.write("NEXT", begun.of())
    assert store.read(BEGUN) is None and store.proposed is not None
    assert Path(store.proposed.place).exists()
    receive(begun, save(TENSORS), "of a trainer that has died")
    before = time.time() - 3600
    os.utime(store.folder / BEGUN, (before, before))
    receive(begun, save(TENSORS), "next")


@pytest.mark.parametrize(
    "body",
    [b"", b"\0" * 8, save(TENSORS)[:-1], save(TENSORS) + b"x", pickle.dumps(TENSORS)],
    ids=["empty", "no header", "torn", "longer", "a pickle"],
)
def test_what_is_no_file_of_tensors(store: WeightStore, body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="safetensors"):
        receive(BegunUpdate(store), body)
    assert {path.name for path in store.folder.iterdir()} <= {"LOCK"}


def test_a_trainer_that_leaves(store: WeightStore) -> None:
    async def torn() -> AsyncIterator[bytes]:
        yield b"abc"
        raise ConnectionError("it has gone")

    with pytest.raises(Exception, match="gone|room"):
        asyncio.run(BegunUpdate(store).receive(torn(), "a"))
    assert not list(store.folder.iterdir())

"""An engine's side of updates of weights."""

from pathlib import Path

import pytest
import torch

from harness import make_harness
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.scheduler.weight_desk import catch_up, joined_version
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.tensors import tensors_version
from rayfin.actors.weights.version import WeightVersion


def test_what_is_decided_while_an_engine_loads() -> None:
    harness = make_harness()
    decided = WeightVersion(2, "2", f"{2:064x}", "/nowhere")
    for _ in range(2):
        catch_up(harness.engine, decided)
        assert harness.executor.version == harness.engine.stats().weight_serial == 2
        assert harness.executor.epoch == 1 and not harness.engine.updates.state(None).pausing
    stream = harness.add(4, 5)
    harness.run()
    harness.check()
    assert set(stream.labels) == {"2"}


def nothing(_: WeightVersion) -> list[bytes]:
    return []


def test_one_that_joins_never_serves_the_base_instead(tmp_path: Path) -> None:
    store, trainer = WeightStore(tmp_path / "app" / "engine"), WeightStore(tmp_path / "a" / "b")
    assert joined_version(store, WeightVersion(), nothing).is_base
    with pytest.raises(InvalidConfig, match="send them again"):
        joined_version(store, WeightVersion(3, "step-3", "d3", "/nowhere"), nothing)
    sent = tensors_version(trainer, {"x": torch.ones(3)})
    decided = WeightVersion(3, "step-3", sent.digest, sent.place)
    assert joined_version(store, decided, nothing) == store.current == decided
    assert joined_version(store, WeightVersion(), nothing) == decided


def test_one_that_joins_gets_the_bytes_from_another(tmp_path: Path) -> None:
    store, elsewhere = WeightStore(tmp_path / "app" / "engine"), WeightStore(tmp_path / "a" / "b")
    sent = tensors_version(elsewhere, {"x": torch.arange(5.0)})
    content = Path(sent.place).read_bytes()
    decided = WeightVersion(3, "step-3", sent.digest, "/on/another/node")
    with pytest.raises(InvalidConfig, match="send them again"):
        joined_version(store, decided, lambda _: [content[:-3]])  # it died amid it
    own = joined_version(store, decided, lambda _: [content[:9], content[9:]])
    assert own == store.current and Path(own.place).read_bytes() == content
    assert joined_version(store, decided, nothing) == own

"""Room for more engines."""

import pytest
import ray

from rayfin.actors.config import EngineArgs
from rayfin.deployments import app
from rayfin.deployments.app import has_room


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What a cluster with GPUs has left."""
    left = {"CPU": 4.0, "GPU": 2.0, "memory": 1e9}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    monkeypatch.setattr(ray, "available_resources", lambda: left)
    monkeypatch.setattr(app, "running_engines", lambda deployment: 2)
    return left


def test_without_a_cluster_nothing_is_known() -> None:
    assert not ray.is_initialized() and has_room(EngineArgs(), "engine", 9)


@pytest.mark.parametrize(
    ("args", "fits"),
    [
        (EngineArgs(), True),
        (EngineArgs(tensor_parallel_size=2), True),
        (EngineArgs(pipeline_parallel_size=2), True),
        (EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=2), False),
        (EngineArgs(tensor_parallel_size=4, device="cpu"), True),
        (EngineArgs(tensor_parallel_size=5, device="cpu"), False),
    ],
)
def test_what_is_free(free: dict[str, float], args: EngineArgs, fits: bool) -> None:
    assert has_room(args, "engine", 2) is fits


def test_a_kind_that_is_used_up_is_not_listed(free: dict[str, float]) -> None:
    del free["GPU"]
    assert not has_room(EngineArgs(), "engine", 2)
    assert has_room(EngineArgs(device="cpu"), "engine", 2)


@pytest.mark.parametrize(("wanted", "fits"), [(1, True), (3, True), (4, False)])
def test_those_that_are_added_need_room_too(
    free: dict[str, float], wanted: int, fits: bool
) -> None:
    """Two engines run, and two more fit: one of them is the one that comes first."""
    assert has_room(EngineArgs(), "engine", wanted) is fits

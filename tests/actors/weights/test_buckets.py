"""Buckets of a trainer's tensors, in the store of a Ray that is only a dictionary."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.weights import buckets
from rayfin.actors.weights.buckets import opened, put
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.writer import FILLER
from rayfin.deployments.client.weights import write_version

TENSORS = {
    "one": torch.arange(6.0).view(2, 3),
    "odd": torch.arange(3.0).bfloat16(),
    "scalar": torch.tensor(4.0, requires_grad=True),
    "none": torch.zeros(0, 4, dtype=torch.float16),
    "turned": torch.arange(12.0).view(3, 4).T,
}


class Ref:
    """A ref of the dictionary."""


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[Ref, Any]:
    objects: dict[Ref, Any] = {}

    def put_object(value: Any) -> Ref:
        value[1].flags.writeable = False  # as Ray gives it back
        objects[ref := Ref()] = value
        return ref

    def get(ref: Ref, timeout: float) -> Any:
        if ref not in objects:
            raise ray.exceptions.OwnerDiedError("0" * 56, None, "")
        return objects[ref]

    for name, value in (("put", put_object), ("get", get), ("ObjectRef", Ref)):
        monkeypatch.setattr(buckets.ray, name, value)
    return objects


@pytest.mark.parametrize("bucket", [1, 40, 1 << 20])
def test_tensors_of_several_programs(bucket: int, stored: dict[Ref, Any], tmp_path: Path) -> None:
    names = list(TENSORS)
    parts = [{name: TENSORS[name] for name in share} for share in (names[:2], names[2:])]
    refs = [ref for part in parts for ref in put(part, bucket)]
    assert len(refs) == {1: 5, 40: 3, 1 << 20: 2}[bucket]
    assert all(len(data) <= max(bucket, 48) for _, data in stored.values())
    version = write_version(WeightStore(tmp_path / "a" / "b"), refs, "step-1", EngineArgs())
    written = load_file(version.place)
    assert TENSORS.keys() == {name for name in written if not name.startswith(FILLER)}
    for name, tensor in TENSORS.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor)


def test_one_at_a_time(stored: dict[Ref, Any]) -> None:
    refs = put(TENSORS.items(), 1)
    next(refs)
    assert len(stored) == 1


@pytest.mark.parametrize("content", [None, ("x", np.zeros(3, np.uint8)), ([("a", "I8", (1,), 0)],)])
def test_what_is_no_bucket(content: Any, stored: dict[Ref, Any]) -> None:
    ref = Ref()
    if content is not None:
        stored[ref] = content
    with pytest.raises(InvalidRequest, match="bucket"):
        list(opened([ref]))
    with pytest.raises(InvalidRequest, match="int64"):
        list(put({"ids": torch.arange(3)}))

"""Settings of pages on a disk, and what refuses them."""

from dataclasses import replace
from typing import Any

import pytest

from rayfin.actors.config import EngineArgs, ModelFacts, resolve, resolve_limits
from rayfin.actors.errors import InvalidConfig

FACTS = ModelFacts(
    architecture="Toy",
    vocab_size=50,
    max_position=256,
    page_bytes=4096,
    available_bytes=1 << 20,
    page_namespace="toy",
)


def _resolve(facts: ModelFacts = FACTS, **settings: Any) -> Any:
    args = EngineArgs(**settings)
    return resolve(args, facts, resolve_limits(args, "cpu", 256)).page_folder


def test_a_folder(tmp_path: Any) -> None:
    assert _resolve() is None
    folder = _resolve(kv_disk_path=str(tmp_path), kv_disk_size=0.5)
    assert (folder.path, folder.namespace, folder.max_bytes) == (str(tmp_path), "toy", 1 << 29)
    assert _resolve(kv_disk_path="~/pages").path[:2] != "~/"


@pytest.mark.parametrize(
    "settings, facts, name, says",
    [
        ({"kv_disk_size": 0.0}, {}, "kv_disk_size", "must be over 0"),
        ({"kv_disk_size": float("nan")}, {}, "kv_disk_size", "must be over 0"),
        ({"kv_disk_size": 1e-9}, {}, "kv_disk_size", "does not hold a page"),
        ({"prefix_caching": False}, {}, "kv_disk_path", "needs prefix_caching"),
        ({}, {"page_namespace": "", "state_bytes": 8}, "kv_disk_path", "recurrent states"),
        ({}, {"page_namespace": "", "whole_prompts": True}, "kv_disk_path", "no prefix cache"),
    ],
)
def test_refused(settings: Any, facts: Any, name: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says) as refusal:
        _resolve(replace(FACTS, **facts), kv_disk_path="pages", **settings)
    assert refusal.value.param == name

"""Host memory behind a GPU: how many pages it takes, and what refuses it."""

from dataclasses import replace
from typing import Any

import pytest

from rayfin.actors.config import EngineArgs, ModelFacts, resolve, resolve_limits
from rayfin.actors.errors import InvalidConfig

GPU = ModelFacts(
    architecture="Toy",
    vocab_size=50,
    max_position=256,
    page_bytes=1 << 20,
    available_bytes=1 << 26,
    device="cuda",
)


def _pages(facts: ModelFacts = GPU, **settings: Any) -> int:
    args = EngineArgs(**settings)
    return resolve(args, facts, resolve_limits(args, "cuda", 256)).num_offloaded_pages


def test_pages() -> None:
    """As in vLLM the size is that of all ranks."""
    assert _pages() == 0
    assert _pages(kv_offloading_size=2) == 2048
    assert _pages(kv_offloading_size=2, tensor_parallel_size=2) == 1024


@pytest.mark.parametrize(
    "settings, facts, says",
    [
        ({"kv_offloading_size": 0.0}, {}, "must be over 0"),
        ({"kv_offloading_size": float("inf")}, {}, "must be over 0"),
        ({"kv_offloading_size": 1e-9}, {}, "does not hold a page"),
        ({"prefix_caching": False}, {}, "needs prefix_caching"),
        ({}, {"device": "cpu"}, "a kv_disk_path on a tmpfs"),
        ({}, {"state_bytes": 8}, "recurrent states"),
        ({}, {"whole_prompts": True}, "no prefix cache"),
    ],
)
def test_refused(settings: Any, facts: Any, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says) as refusal:
        _pages(replace(GPU, **facts), **{"kv_offloading_size": 1.0, **settings})
    assert refusal.value.param == "kv_offloading_size"

"""vLLM's connectors become settings, and what engines do otherwise is refused."""

from typing import Any

import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig


def in_memory(size: Any, *tiers: dict[str, Any]) -> dict[str, Any]:
    config = offloading(*tiers)
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = size
    return config


def offloading(*tiers: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"secondary_tiers": list(tiers)}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (None, {}),
        ({}, {}),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {"kv_peers": True}),
        (
            {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
            },
            {"kv_peers": True},
        ),
        (offloading({"type": "fs", "root_dir": "/pages"}), {"kv_disk_path": "/pages"}),
        (offloading({"type": "p2p", "port": 5555}), {"kv_peers": True, "kv_port": 5555}),
        (
            offloading({"type": "fs", "root_dir": "/pages"}, {"type": "p2p"}),
            {"kv_disk_path": "/pages"},
        ),
        (in_memory(3 << 29), {"kv_offloading_size": 1.5}),
        (
            in_memory(1 << 30, {"type": "fs", "root_dir": "/pages"}),
            {"kv_offloading_size": 1.0, "kv_disk_path": "/pages"},
        ),
    ],
)
def test_what_connectors_become(config: dict[str, Any] | None, settings: dict[str, Any]) -> None:
    off = {"kv_peers": False} if "kv_peers" in settings else {}
    args = EngineArgs(kv_transfer_config=config, **off)
    assert args == EngineArgs(**settings) and args.identity == EngineArgs(**settings).identity


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "must be an object"),
        ({"connector": "x"}, "has no key 'connector'"),
        ({"kv_role": "kv_both"}, "needs kv_connector"),
        ({"kv_connector": "NixlConnector"}, "kv_role must be one of"),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, "with prefill_engines"),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}, "with prefill_engines"),
        (
            {"kv_connector": "X", "kv_role": "kv_both", "kv_load_failure_policy": "fail"},
            "must be recompute",
        ),
        (offloading(), "needs cpu_bytes_to_use or secondary_tiers"),
        (in_memory(0), "cpu_bytes_to_use must be over 0"),
        (in_memory("1G"), "cpu_bytes_to_use must be over 0"),
        (offloading({"type": "fs"}), r"secondary_tiers\[0\] needs root_dir"),
        (offloading({"type": "p2p", "port": "x"}), r"secondary_tiers\[0\] needs a port"),
        (offloading({"type": "obj"}), r"secondary_tiers\[0\] must be"),
    ],
)
def test_what_is_refused(config: Any, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said) as refused:
        EngineArgs(kv_transfer_config=config)
    assert refused.value.param == "kv_transfer_config"


def test_values_are_checked_as_those_of_flags() -> None:
    with pytest.raises(InvalidConfig, match="kv_port must be in"):
        EngineArgs(kv_transfer_config=offloading({"type": "p2p", "port": 70000}))

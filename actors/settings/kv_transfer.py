"""vLLM's connectors of KV caches, ``kv_transfer_config``, as the settings that do the same here."""

from collections.abc import Mapping
from typing import Any, NoReturn

from rayfin.actors.errors import InvalidConfig

OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector")
ROLES = ("kv_producer", "kv_consumer", "kv_both")
KEYS = (
    *("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy"),
    *("engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip"),
    *("kv_port", "kv_connector_module_path", "enable_permute_local_kv"),
)


def read_kv_transfer(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Reads vLLM's object; returns settings by Rayfin's names.

    Raises:
        InvalidConfig: a key or value that is none, or what engines here do otherwise.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        _refuse("must be an object")
    for key in config:
        if key not in KEYS:
            _refuse(f"has no key {key!r}; it has {', '.join(KEYS)}")
    role, connector = config.get("kv_role"), config.get("kv_connector")
    if connector is None:
        if role is not None:
            _refuse("needs kv_connector where it has kv_role")
        return {}
    if role not in ROLES:
        _refuse(f"kv_role must be one of {', '.join(ROLES)}, got {role!r}")
    if role != "kv_both":
        _refuse(
            f"kv_role {role} is not supported: one server has both kinds of engines, with "
            "prefill_engines"
        )
    if config.get("kv_load_failure_policy", "recompute") != "recompute":
        _refuse("kv_load_failure_policy must be recompute: no request fails for want of pages")
    if connector not in OFFLOADING:  # NixlConnector, say: here sockets carry the pages
        return {"kv_peers": True}
    return _of_tiers(config.get("kv_connector_extra_config") or {})


def _of_tiers(extra: Any) -> dict[str, Any]:
    """The settings of the memory of vLLM's host, and of the tiers behind it."""
    read = extra if isinstance(extra, Mapping) else {}
    size, tiers = read.get("cpu_bytes_to_use"), read.get("secondary_tiers", [])
    if not isinstance(tiers, list) or (size is None and not tiers):
        _refuse("kv_connector_extra_config needs cpu_bytes_to_use or secondary_tiers, a list")
    settings: dict[str, Any] = {}
    if size is not None:
        if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
            _refuse(f"kv_connector_extra_config.cpu_bytes_to_use must be over 0, got {size!r}")
        settings["kv_offloading_size"] = size / 2**30
    for place, tier in enumerate(tiers):
        path = f"kv_connector_extra_config.secondary_tiers[{place}]"
        match tier:
            case {"type": "fs", "root_dir": str(folder)}:
                settings["kv_disk_path"] = folder
            case {"type": "p2p", "port": int(port)}:
                settings |= {"kv_peers": True, "kv_port": port}
            case {"type": "p2p"} if "port" not in tier:
                settings["kv_peers"] = True
            case {"type": "fs" | "p2p" as kind}:
                _refuse(f"{path} needs {'root_dir, a string' if kind == 'fs' else 'a port'}")
            case _:
                _refuse(f'{path} must be {{"type": "fs"}} or {{"type": "p2p"}}')
    return settings


def _refuse(rule: str) -> NoReturn:
    raise InvalidConfig(f"kv_transfer_config {rule}", "kv_transfer_config")

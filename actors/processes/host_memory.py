"""Memory that is free on this machine, and memory that this process holds."""

import os
from pathlib import Path

V1 = "memory/memory."
CGROUPS = (  # limit, usage, statistics, and the field there of cached files that are easily dropped
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (f"{V1}limit_in_bytes", f"{V1}usage_in_bytes", f"{V1}stat", "total_inactive_file"),
)
"""Files below /sys/fs/cgroup, of version 2 and of version 1."""


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes that a new process could take: the machine's, or its control group's if they are fewer.

    Cached files that are easily dropped count as free. 0 where the system does not say.
    """
    free = _field(root / "proc/meminfo", "MemAvailable:") * 1024
    folder = root / "sys/fs/cgroup"
    for limit, usage, statistics, cached in CGROUPS:
        try:
            left = int((folder / limit).read_text()) - int((folder / usage).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        free = min(free, left + _field(folder / statistics, cached))
    return max(free, 0)


def resident_bytes() -> int:
    """Bytes of this process in memory, shared ones too; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _field(path: Path, name: str) -> int:
    """The number behind ``name`` in a file of names and numbers; 0 if it is not there."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(words[1]) for words in lines if words[:1] == [name]), 0)

"""Free memory, of a machine and of a control group."""

from pathlib import Path

import pytest

from rayfin.actors.processes.host_memory import free_bytes, resident_bytes

MEMINFO = "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   4000 kB\n"


def make(root: Path, **files: str) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(limit: str, usage: int, cached: int) -> dict[str, str]:
    folder = "sys/fs/cgroup/"
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": str(usage),
        f"{folder}memory.stat": f"anon 5\ninactive_file {cached}\nactive_file 7\n",
    }


def first_group(limit: int, usage: int, cached: int) -> dict[str, str]:
    folder = "sys/fs/cgroup/memory/memory."
    return {
        f"{folder}limit_in_bytes": str(limit),
        f"{folder}usage_in_bytes": str(usage),
        f"{folder}stat": f"inactive_file 1\ntotal_inactive_file {cached}\n",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4_096_000),
        (group("max", 100, 50), 4_096_000),
        (group("1000000", 400_000, 30_000), 630_000),
        (group("9000000", 400_000, 30_000), 4_096_000),  # the machine has less
        (group("1000", 5000, 10), 0),
        (first_group(1_000_000, 400_000, 30_000), 630_000),
        (first_group(9_223_372_036_854_771_712, 400_000, 30_000), 4_096_000),
    ],
)
def test_free_bytes(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert free_bytes(make(tmp_path, **files)) == expected


def test_a_system_that_does_not_say_has_none(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_memory_of_this_process_grows_with_what_it_holds() -> None:
    before, held = resident_bytes(), bytearray(b"x" * (64 << 20))
    assert free_bytes() > 0
    assert len(held) / 2 < resident_bytes() - before < 2 * len(held)

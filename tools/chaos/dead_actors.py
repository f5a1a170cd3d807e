"""Measures the memory that Ray keeps of each dead actor in the process that called it.

    python tools/chaos/dead_actors.py

Rayfin does not run here: an actor creates others, calls each, kills it, and asks malloc for the
memory in use. The soak's runners die in the same way.
"""

import ctypes
import gc
import os
import signal
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import ray
from ray.exceptions import RayError

DEATHS, SETTLED = 80, 20  # actors that die; the first ones do not count
CALLS = 20


@ray.remote(num_cpus=0)
class Victim:
    """An actor without state."""

    def process(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class Caller:
    """Creates and kills victims one after another."""

    def deaths(self, count: int) -> list[float]:
        """Returns the KiB in use after each of ``count`` deaths."""
        kibibytes = []
        for _ in range(count):
            victim = Victim.remote()
            process = [ray.get(victim.process.remote()) for _ in range(CALLS)][0]
            os.kill(process, signal.SIGKILL)
            try:
                ray.get(victim.process.remote())
            except RayError:
                del victim
            gc.collect()
            kibibytes.append(in_use())
        return kibibytes


def in_use() -> float:
    """KiB that this process has allocated through malloc."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    libc.fclose.argtypes = [ctypes.c_void_p]
    libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "malloc")
        file = libc.fopen(os.fsencode(path), b"w")
        libc.malloc_info(0, file)
        libc.fclose(file)
        heaps = ElementTree.parse(path).getroot().findall("heap")
    held = sum(
        int(each.get("size", 0))
        for heap in heaps
        for each in heap.findall("system[@type='current']")
    )
    free = sum(int(each.get("size", 0)) for heap in heaps for each in heap.findall("total"))
    return (held - free) / 1024


def main() -> int:
    environment = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "MALLOC_ARENA_MAX": "2"}
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        caller = Caller.options(runtime_env={"env_vars": environment}).remote()
        kibibytes: list[float] = ray.get(caller.deaths.remote(DEATHS))
        ray.shutdown()
    slope, _ = np.polyfit(np.arange(SETTLED, DEATHS), kibibytes[SETTLED:], 1)
    print(f"Ray {ray.__version__} keeps {slope:.1f} KiB of each dead actor")
    return 0


if __name__ == "__main__":
    sys.exit(main())

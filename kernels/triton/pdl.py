"""Programmatic dependent launch (PDL): a kernel starts while the one before it still computes.

A kernel waits (`gdc_wait`) until the kernel before it is complete and what that one wrote is
visible. Then it tells that the next one may start. So at most one kernel waits beside the one that
computes: more of them would take the place of programs that have work. Before its wait a kernel
writes nothing, and reads only weights and what is complete before its step's first layer. Each
program waits, on every path, so that a wait is for all kernels before it.

It pays in steps of few rows, whose kernels take a few microseconds. In larger ones programs that
wait keep others from a multiprocessor (measured on an H200: docs/benchmarks/gpu.md).
"""

import os
from typing import Any

import torch

FIRST_CAPABILITY = (9, 0)  # Hopper


def can_use_pdl(device: torch.device) -> bool:
    """Whether kernels on a device may start before the ones before them end.

    It is off in Triton's interpreter. The environment variable ``RAYFIN_PDL=0`` switches it off, to
    measure what it gives or to rule it out.
    """
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET", "0") == "1":
        return False
    capable = torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    return capable and os.environ.get("RAYFIN_PDL") != "0"


def launch_options(pdl: bool) -> dict[str, Any]:
    """The arguments of a launch, for a kernel that has a constant ``PDL``."""
    return {"PDL": True, "launch_pdl": True} if pdl else {}

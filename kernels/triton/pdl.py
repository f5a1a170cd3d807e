"""Programmatic dependent launch (PDL): a kernel starts while the one before it still computes.

With PDL, a kernel tells at its start that the next one may start, and waits (`gdc_wait`) until the
kernel before it is complete and what that one wrote is visible. Before its wait a kernel writes
nothing, and reads only weights and what is complete before its step's first layer. Each program
waits, on every path, so that a wait is for all kernels before it.
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

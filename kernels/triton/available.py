"""Whether this folder can be used: importing most of its modules needs Triton."""

import importlib.util

import torch


def can_use_triton(device: torch.device) -> bool:
    """True on a GPU with Triton, which torch for GPUs installs."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None

"""Whether the kernels of this folder can be used: its other modules need Triton to be imported."""

import importlib.util

import torch


def can_use_triton(device: torch.device) -> bool:
    """On a GPU with Triton installed, as torch for a GPU brings it along."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None

"""Copies small arrays from the host to a device without waiting."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def staged(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a host tensor to copy to ``device``, pinned if that is a GPU.

    Only copies from pinned memory are asynchronous. torch's allocator does not reuse pinned memory
    before copies from it are done, so the tensor may be dropped at once. For a CPU the tensor
    shares the array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on ``device``; on a GPU the copy is queued on the current stream."""
    if device.type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(array))
    return staged(array, device).to(device, non_blocking=True)

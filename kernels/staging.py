"""Small arrays on their way from the host to a device, so that the host need not wait for them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def staged(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the host to copy to ``device`` from: pinned for a GPU.

    Only from pinned memory does a copy run beside the host. torch's allocator gives such memory
    to nobody else before the copies from it have been made, so that the tensor may be dropped at
    once; for a CPU it shares the array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on ``device``; on a GPU the copy may still be under way on its current stream."""
    return staged(array, device).to(device, non_blocking=True)

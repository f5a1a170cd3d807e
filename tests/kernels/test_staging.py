"""Arrays on their way to a device."""

import numpy as np
import pytest
import torch

from rayfin.kernels import shapes
from rayfin.kernels.shapes import ALIGNMENT, all_to_device, staged, to_device


def test_an_array_arrives_as_it_is() -> None:
    """Also a part of another array, and one with nothing in it."""
    whole = np.arange(12, dtype=np.int32).reshape(3, 4)
    for array in (whole, whole[:, 1:3], whole[:0]):
        arrived = to_device(array, torch.device("cpu"))
        assert arrived.dtype == torch.int32 and arrived.is_contiguous()
        assert arrived.numpy().tolist() == array.tolist()


def test_a_gpu_gets_it_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    assert staged(np.ones(3), torch.device("cuda")).tolist() == [1, 1, 1]
    assert len(pinned) == 1
    staged(np.ones(0), torch.device("cuda"))
    staged(np.ones(3), torch.device("cpu"))
    assert len(pinned) == 1


def test_arrays_travel_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several types and shapes, with parts of others and empty ones, at aligned addresses."""
    copies: list[int] = []

    def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
        copies.append(array.nbytes)
        return torch.from_numpy(array)

    monkeypatch.setattr(shapes, "to_device", send)
    whole = np.arange(35, dtype=np.int32).reshape(5, 7)
    arrays = [
        whole[1:4, :5],
        np.zeros(0, np.int64),
        np.array([0.5, -2.0, 7.25], np.float32),
        np.array([2**40, -3], np.int64),
        np.zeros((0, 4), np.int32),
        whole[:, 0],
    ]
    tensors = all_to_device(arrays, torch.device("cuda"))
    assert len(copies) == 1 and copies[0] % ALIGNMENT == 0
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.numpy().dtype == array.dtype and tensor.is_contiguous()
        assert tuple(tensor.shape) == array.shape and tensor.tolist() == array.tolist()
        assert (tensor.data_ptr() - tensors[0].data_ptr()) % ALIGNMENT == 0 or not array.size

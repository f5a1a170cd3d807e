"""Arrays on their way to a device."""

import numpy as np
import pytest
import torch

from rayfin.kernels.shapes import staged, to_device


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

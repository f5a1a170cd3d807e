"""No kernel has an argument that Triton keeps for itself; only a launch on a GPU refuses it."""

import importlib
import pkgutil
from typing import Any

import pytest

pytest.importorskip("triton")
from triton.backends.nvidia.compiler import CUDAOptions

from rayfin.kernels.triton import device as package

LAUNCH = {"grid", "warmup", "stream", "device", "device_type"}
"""Taken by ``JITFunction.run``, or refused by it."""


def kernels() -> dict[str, Any]:
    """Name -> function, of all that `triton.jit` has wrapped."""
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        names = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        found |= {name: each for name, each in names.items() if hasattr(each, "arg_names")}
    return found


def test_arguments_are_not_those_of_a_launch() -> None:
    reserved = LAUNCH | set(CUDAOptions.__dataclass_fields__)
    assert {"num_warps", "launch_pdl"} <= reserved and len(kernels()) > 15
    for name, kernel in kernels().items():
        assert not reserved & set(kernel.arg_names), name

"""Tests of Triton kernels run on the GPU where there is one, else in Triton's interpreter.

`tests/conftest.py` says which.
"""

from collections.abc import Callable

import pytest
import torch

import quick_interpreter

quick_interpreter.install()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Asserts that a kernel's result is the reference's, as far as its dtype can tell."""

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[actual.dtype]
        expected = expected.to(device=actual.device, dtype=actual.dtype)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    return check

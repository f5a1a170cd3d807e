"""The quick interpreter of these tests: what it replaces, it puts back; what it computes is so."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted")


@triton.jit
def twice(x):
    return x + x


@triton.jit
def sum_of_twice(source, target, fails, COUNT: tl.constexpr):
    index = tl.arange(0, 8)
    x = tl.load(source + index, mask=index < COUNT, other=0.0)
    if fails:
        x = tl.reshape(x, [3, 3])
    tl.store(target + tl.program_id(0), tl.sum(twice(x), 0) + tl.program_id(0))


def names() -> dict[str, object]:
    owners = {"tl": tl, "core": tl.core, "math": tl.math, "tensor": tl.tensor, "dtype": tl.dtype}
    return {
        f"{owner}.{name}": value
        for owner, own in owners.items()
        for name, value in vars(own).items()
        if not name.startswith("__") or name in ("__index__", "__bool__", "__repr__", "__str__")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_launch_writes_its_results_and_leaves_no_name_behind(dtype: torch.dtype) -> None:
    before = names()
    source = torch.arange(1.0, 9.0).to(dtype)
    target = torch.zeros(4, dtype=dtype)
    sum_of_twice[(3,)](source, target, 0, COUNT=5)
    assert target.tolist() == [30.0, 31.0, 32.0, 0.0]
    assert names() == before and tl.core.is_builtin(tl.arange)


def test_nothing_is_left_behind_by_a_launch_that_fails() -> None:
    before = names()
    source, target = torch.ones(8), torch.zeros(4)
    with pytest.raises(interpreter.InterpreterError):
        sum_of_twice[(1,)](source, target, 1, COUNT=8)
    assert names() == before
    sum_of_twice[(1,)](source, target, 0, COUNT=8)
    assert target[0] == 16

"""Threads: many short operations, several pools, several callers."""

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from rayfin.kernels.cpu.kernels import CpuKernels

Make = Callable[[str | None, int], CpuKernels]
PATIENCE = 30.0  # seconds; only a failure waits so long


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_thousands_of_short_operations(make_kernels: Make, threads: int) -> None:
    kernels = make_kernels(None, threads)
    weight, x = torch.randn(300, 64), torch.randn(3, 64)
    matrix = kernels.pack([weight])
    expected = kernels.matmul(x, matrix)
    out = torch.empty_like(expected)
    for _ in range(500):
        out.fill_(-1.0)
        kernels.matmul(x, matrix, out=out)
        assert torch.equal(out, expected)


def test_callers_take_turns(make_kernels: Make) -> None:
    kernels = make_kernels(None, 2)
    weight = torch.randn(257, 96)
    matrix = kernels.pack([weight])
    failures = []

    def call(seed: int) -> None:
        x = torch.randn(1 + seed % 20, 96, generator=torch.Generator().manual_seed(seed))
        expected = x @ weight.T
        for _ in range(100):
            if not torch.allclose(kernels.matmul(x, matrix), expected, atol=1e-4):
                failures.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_two_pools_and_their_end(make_kernels: Make) -> None:
    """Threads end with the object that owns them."""
    before = threads_of_this_process()
    pools = [make_kernels(None, 3), make_kernels(None, 4)]
    begun = threads_of_this_process() - before
    assert len(begun) == 2 + 3
    x, weight = torch.randn(2, 8), torch.randn(5, 8)
    for kernels in pools:
        torch.testing.assert_close(kernels.matmul(x, kernels.pack([weight])), x @ weight.T)
    del pools, kernels
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while begun & threads_of_this_process():  # Linux lists a joined thread for a moment more
        assert time.monotonic() < deadline
        time.sleep(0.01)


def threads_of_this_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))

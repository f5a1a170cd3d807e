"""The compiled kernels of every instruction set that this machine has."""

from collections.abc import Callable

import pytest

from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.cpu.library import ISAS, LibraryUnavailable, load

EVERY_ISA = pytest.mark.thorough(reason="`make test` has the best instruction set")
SETUPS = [
    *(pytest.param((isa, 1), marks=EVERY_ISA) for isa in ISAS),
    *((None, threads) for threads in (1, 2, 5)),
]
"""Every instruction set, and the best one on one, two and more threads than there are cores."""


def kernels_or_skip(isa: str | None, threads: int) -> CpuKernels:
    """Skips where there is no compiler, or the machine is too old for ``isa``."""
    try:
        load(isa)
    except LibraryUnavailable as error:
        pytest.skip(str(error))
    return CpuKernels(threads, isa)


@pytest.fixture(scope="session", params=SETUPS, ids=lambda s: f"{s[0] or 'best'}-{s[1]}")
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return kernels_or_skip(*request.param)


@pytest.fixture(scope="session")
def make_kernels() -> Callable[[str | None, int], CpuKernels]:
    return kernels_or_skip

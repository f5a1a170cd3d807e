"""The kernels for Arm, cross-compiled and run in an emulator, give what this machine's give."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NEON = ("-march=armv8.2-a+dotprod",)
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=fast", "-Wno-psabi", "-pthread")

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR) and shutil.which("g++"))
    or "fma" not in Path("/proc/cpuinfo").read_text().split(),
    reason="needs g++, g++-aarch64-linux-gnu, qemu-user, and an x86 processor with FMAs",
)


def results(folder: Path, compiler: str, *flags: str, run: tuple[str, ...] = ()) -> np.ndarray:
    """What the driver computes for each operation, float32."""
    program, file = folder / "driver", folder / "results"
    sources = [str(path) for path in (ROOT / "kernels/cpu").glob("*/*.cpp")]
    driver = str(ROOT / "tests/kernels/cpu/driver.cpp")
    include = f"-I{ROOT / 'kernels/cpu'}"
    command = [compiler, *FLAGS, *flags, include, driver, *sources, "-o", str(program)]
    subprocess.run(command, check=True)
    subprocess.run([*run, str(program), str(file)], check=True)
    return np.fromfile(file, np.float32)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    # Vectors of four floats, as NEON's, and FMAs: the same bits.
    return results(tmp_path_factory.mktemp("here"), "g++", "-mfma")


@pytest.mark.slow(reason="compiles all kernels twice and runs them in an emulator")
@pytest.mark.parametrize("flags", [(), NEON], ids=["portable", "neon"])
def test_results(flags: tuple[str, ...], expected: np.ndarray, tmp_path: Path) -> None:
    found = results(tmp_path, COMPILER, "-static", *flags, run=(EMULATOR,))
    assert found.shape == expected.shape
    wrong = ~np.isclose(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not wrong.any(), (np.flatnonzero(wrong)[:10], found[wrong][:10], expected[wrong][:10])

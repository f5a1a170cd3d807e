"""The wheel for aarch64 from a cross compiler: its kernels load and multiply under an emulator."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rayfin.kernels.cpu.library import source_hash

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.slow(reason="compiles the kernels"),
    pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}"),
]
ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = "/usr/aarch64-linux-gnu"  # the other machine's, of Debian's compiler


def test_kernels_load_and_multiply(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel")
    into = tmp_path / "dist"
    command = [sys.executable, "tools/wheel.py", "--machine", "aarch64", "--into", str(into)]
    built = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert built.returncode == 0, built.stdout
    (wheel,) = into.iterdir()
    assert wheel.name.endswith("_aarch64.whl") and "manylinux_2" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path, libraries)
    assert {Path(name).name.split(".")[0] for name in libraries} == {"_portable", "_neon"}
    assert all("aarch64-linux-gnu" in name for name in libraries)
    program = str(tmp_path / "loads")
    flags = ["-std=c++17", "-Wno-psabi", "-I", "kernels/cpu"]
    source = "tests/kernels/cpu/loads.cpp"
    subprocess.run([COMPILER, *flags, source, "-ldl", "-o", program], cwd=ROOT, check=True)
    for library in libraries:
        run = [EMULATOR, "-L", LIBRARIES, program, str(tmp_path / library)]
        done = subprocess.run([*run, source_hash()], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "neon\n"), done.stderr
        other = subprocess.run([*run, "0123"], capture_output=True, text=True)
        assert other.returncode == 1 and "other sources" in other.stderr

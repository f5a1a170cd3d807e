"""Every kernel compiles for a Hopper GPU, whether there is one or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SHARED_BYTES = 227 << 10


def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    """In a process of its own: here Triton may be an interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    source = Path(__file__).resolve().parents[3] / "src"
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(source), environment.get("PYTHONPATH")))
    )
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    shared = dict(line.split("\t") for line in done.stdout.splitlines())
    assert shared
    for name, used in shared.items():
        assert int(used) <= SHARED_BYTES, f"{name} wants {used} bytes of shared memory"

"""Every kernel compiles for a Hopper GPU, whether there is one or not, into what was meant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SHARED_BYTES = 227 << 10
REGISTERS = 65536  # of a multiprocessor

# Loads that each loop leaves in flight, threads of a program, programs of a multiprocessor at once.
# A load is one tensor's part of a block: keys and values are two. The second loop of decode tiles
# merges parts.
HELD = {
    "decode bf16 128, pages bf16": ([4, 6], 128, 4),
    "decode bf16 128, pages fp8e4nv": ([4, 6], 128, 4),
    "decode fp16 64, pages fp16": ([4, 6], 128, 4),
    "prefill bf16 128, pages bf16": ([2], 256, 1),
    "prefill fp16 64, pages fp16": ([2], 256, 1),
    "product bf16 1 x 1024": ([8], 128, 3),
    "added product bf16 1 x 1024": ([8], 128, 3),
    "gated product bf16 16 x 3072": ([6], 128, 4),
    "added product bf16 64 x 1024": ([8], 128, 1),
    "product bf16 64 x 28672": ([4], 128, 1),
    "gated product bf16 64 x 28672": ([6], 128, 1),
    "map": ([], 128, 8),
    "enter": ([], 128, 16),
    "finish": ([], 128, 16),
}
FP32_STACK = 32
"""Bytes that a kernel of fp32 may spill, which is not what a GPU serves."""


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
    kernels = {facts["name"]: facts for facts in map(json.loads, done.stdout.splitlines())}
    assert HELD.keys() <= kernels.keys()
    for name, facts in kernels.items():
        assert facts["shared"] <= SHARED_BYTES, f"{name} wants {facts['shared']} bytes of it"
        assert facts["registers"] <= 255
        assert facts["stack"] <= FP32_STACK * ("fp32" in name), f"{name} spills registers"
    for name, (in_flight, threads, programs) in HELD.items():
        facts = kernels[name]
        assert facts["in_flight"] == in_flight, f"{name} waits for loads: {facts}"
        assert facts["shared"] * programs <= SHARED_BYTES, f"{name} takes too much: {facts}"
        assert facts["registers"] * threads * programs <= REGISTERS, f"{name}: {facts}"

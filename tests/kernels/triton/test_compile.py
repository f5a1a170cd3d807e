"""Every kernel compiles for a Hopper GPU, whether there is one or not, into what was meant."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from ptx_waits import before_wait

SHARED_BYTES = 227 << 10
REGISTERS = 65536  # of a multiprocessor

# Loads that each loop leaves in flight, threads of a program, programs of a multiprocessor at once.
# A load is one tensor's part of a block: keys and values are two; rows, codes and scales three. The
# second loop of decode tiles merges parts.
HELD = {
    "decode bf16 128, pages bf16": ([4, 6], 128, 4),
    "decode bf16 128, pages fp8e4nv": ([4, 6], 128, 4),
    "decode fp16 64, pages fp16": ([4, 6], 128, 4),
    "prefill bf16 128, pages bf16": ([2], 256, 1),
    "prefill fp16 64, pages fp16": ([2], 256, 1),
    "decode bf16 128, pages bf16, two loops": ([4, 4, 6], 128, 4),
    "decode bf16 128, pages fp8e4nv, two loops, form 1": ([4, 4, 6], 128, 4),
    "decode bf16 128, pages fp8e4nv, two loops, form 3": ([4, 4, 6], 128, 4),
    "prefill bf16 128, pages bf16, two loops": ([2, 2], 256, 1),
    "prefill bf16 128, pages fp8e4nv, two loops, form 3": ([2, 2], 256, 1),
    "decode bf16 128, pages bf16, by page": ([4, 6], 128, 4),
    "decode bf16 128, pages fp8e4nv, two loops, form 3, by page": ([4, 4, 6], 128, 4),
    "product bf16 2 x 1024 x 4096": ([], 128, 5),
    "added product bf16 1 x 3072 x 1024": ([], 128, 8),
    "gated product bf16 2 x 4096 x 14336": ([], 128, 4),
    "product by mma 8 x 1024 x 4096": ([], 512, 3),
    "product by mma 16 x 1024 x 4096": ([], 512, 2),
    "gated product by mma 8 x 1024 x 3072": ([], 512, 3),
    "gated product by mma 16 x 1024 x 3072": ([], 512, 2),
    "added product by mma 16 x 3072 x 1024": ([], 512, 1),
    "coded product bf16 1 x 4096, 4 bits, kind 0, groups of 128": ([12], 128, 4),
    "coded product bf16 8 x 28672, 4 bits, kind 0, groups of 128": ([12], 128, 5),
    "coded product bf16 64 x 28672, 4 bits, kind 0, groups of 128": ([6], 128, 2),
    "coded product bf16 65 x 28672, 4 bits, kind 0, groups of 128": ([7], 256, 1),
    "coded product bf16 1 x 4096, 8 bits, kind 1, groups of 128": ([8], 128, 3),
    "coded product bf16 64 x 28672, 8 bits, kind 1, groups of 128": ([4], 128, 2),
    "map": ([], 128, 8),
    "enter": ([], 128, 16),
    "finish": ([], 128, 16),
}
EARLY = {  # what kernels read before they wait for the kernel before them; all others read nothing
    "decode": {"items", "tables"},
    "prefill": {"items", "tables"},
    "norm": {"out_weight", "weight"},
    "turn and write": {"cosines", "sines", "positions", "slots"},
    "product": {"weight"},
    "added product": {"weight"},
    "gated product": {"weight"},
}
INSTRUCTIONS = {  # of the first loops at most; a warp issues one after the other
    "decode bf16 128, pages bf16, two loops": [300],
    "decode bf16 128, pages fp8e4nv, two loops, form 3": [340],
    "prefill bf16 128, pages bf16, two loops": [460],
    "prefill bf16 128, pages fp8e4nv, two loops, form 3": [425],
    "decode bf16 128, pages bf16, by page": [275],
    "decode bf16 128, pages fp8e4nv, two loops, form 3, by page": [305],
    "prefill bf16 128, pages bf16, by page": [575],
    "prefill bf16 128, pages fp8e4nv, two loops, form 3, by page": [390],
    "coded product bf16 8 x 28672, 4 bits, kind 0, groups of 128": [350],
    # A choice; then the counts of 16 programs, 16 tiles, and 32 assignments.
    "router softmax": [100],
    "router groups": [150],
    "map 128 experts": [350, 590],
    "map 128 experts, counted": [230, 540, 350],
}
FP32_STACK = 32
"""Bytes that a kernel of fp32 may spill, which is not what a GPU serves."""


def compile_kernels(cache: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Facts of each kernel, from a process of its own: here Triton may be an interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    source = Path(__file__).resolve().parents[3] / "src"
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(source), environment.get("PYTHONPATH")))
    )
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return {facts["name"]: facts for facts in map(json.loads, done.stdout.splitlines())}


def check_sizes(kernels: dict[str, dict[str, Any]]) -> None:
    for name, facts in kernels.items():
        assert facts["shared"] <= SHARED_BYTES, f"{name} wants {facts['shared']} bytes of it"
        assert facts["registers"] <= 255
        assert facts["stack"] <= FP32_STACK * ("fp32" in name), f"{name} spills registers"
    for name in HELD.keys() & kernels.keys():
        in_flight, threads, programs = HELD[name]
        facts = {key: value for key, value in kernels[name].items() if key != "ptx"}
        assert facts["in_flight"] == in_flight, f"{name} waits for loads: {facts}"
        assert facts["shared"] * programs <= SHARED_BYTES, f"{name} takes too much: {facts}"
        assert facts["registers"] * threads * programs <= REGISTERS, f"{name}: {facts}"


def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    kernels = compile_kernels(tmp_path)
    assert HELD.keys() <= kernels.keys()
    check_sizes(kernels)


def test_weights_of_few_bits_fit_a_gpu_of_less_shared_memory(tmp_path: Path) -> None:
    """As sm_86, sm_89 and sm_120 have, 99 KiB; a block is on its way while one is waited for."""
    kernels = compile_kernels(tmp_path, "--arch", "89", "--only", "coded product bf16")
    assert len(kernels) == 18
    for name, facts in kernels.items():
        assert facts["shared"] <= 99 << 10 and facts["registers"] <= 255 and not facts["stack"]
        assert facts["in_flight"], f"{name} reads nothing ahead"


def test_loops_hold_few_instructions(tmp_path: Path) -> None:
    """fp8 pages are read by words and converted in pairs; tiles of 8 rows wait for no product."""
    for part in ("two loops", "by page", "coded product bf16 8 x", "router", "map 128 experts"):
        kernels = compile_kernels(tmp_path, "--sass", "--only", part)
        for name in INSTRUCTIONS.keys() & kernels.keys():
            loops = kernels[name]["loops"]
            assert len(loops) >= len(INSTRUCTIONS[name]), name
            for loop, most in zip(loops, INSTRUCTIONS[name], strict=False):
                assert loop["total"] <= most, f"{name}: {loop}"
            loop = loops[0]
            slow = [each for each in loop if each.startswith(("F2F.", "LDS.U8", "WARPGROUP"))]
            assert not slow or "prefill" in name, f"{name}: {slow}"
            if "by page" in name:
                assert loop["LDG.E"] == (4 if "prefill" in name else 2), f"{name}: {loop}"


def test_kernels_that_start_early_wait_before_they_read(tmp_path: Path) -> None:
    """A read before the wait, of what a kernel of the same layer writes, is a race."""
    kernels = compile_kernels(tmp_path, "--pdl")
    assert {
        "norm",
        "gate 0",
        "finish",
        "sample: draw_rows, logits bf16",
        "decode bf16 128, pages bf16",
    } <= kernels.keys()
    check_sizes(kernels)
    for name, facts in kernels.items():
        found = before_wait(facts["ptx"], facts["pointers"])
        early = next((EARLY[kind] for kind in EARLY if name.startswith(kind)), set())
        assert found.reads == early, f"{name} reads before it waits"
        assert not found.writes, f"{name} writes before it waits"
        assert not found.ends, f"{name} has a path without a wait"
        assert found.launches, f"{name} does not let the next kernel start"
        assert not found.launches_before, f"{name} lets the next but one kernel wait beside it"


FAULTY = """
.visible .entry kernel(.param .u64 kernel_param_0, .param .u64 kernel_param_1)
{
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    add.s64 %rd3, %rd1, 16;
    @%p1 bra $L__BB0_2;
    ld.global.b32 { %r1 }, [ %rd3 + 0 ];
    griddepcontrol.wait; // dummy %r2
    st.global.b32 [ %rd2 + 0 ], { %r1 };
    {after_wait}
$L__BB0_2:
    ld.global.b32 %r4, [%rd2];
    ret;
}
"""


@pytest.mark.parametrize(
    ("after_wait", "reads"),
    [("ret;", {"x", "y"}), ("bra.uni $L__BB0_2;", {"x", "y"}), ("mov.b32 %r3, 0;", {"x", "y"})],
)
def test_a_read_before_the_wait_is_found(after_wait: str, reads: set[str]) -> None:
    found = before_wait(FAULTY.replace("{after_wait}", after_wait), ["x", "y"])
    assert found.reads == reads and found.ends and not found.writes


def test_what_follows_the_wait_is_not_early() -> None:
    ptx = FAULTY.replace("{after_wait}", "").replace("@%p1 bra $L__BB0_2;", "")
    found = before_wait(ptx, ["x", "y"])
    assert found.reads == {"x"} and not found.ends and not found.writes

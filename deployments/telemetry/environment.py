"""What a report of a fault should say of a machine: versions, processors, memory, variables."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rayfin import __version__
from rayfin.actors.code_version import code_version
from rayfin.actors.timing import TOOL_SECONDS

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton"),
    *("ray", "fastapi", "starlette", "uvicorn", "pydantic", "llguidance", "huggingface-hub"),
)
INSTRUCTIONS = (
    *("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm"),
)
VARIABLES = ("RAYFIN", "RAY_", "VLLM_", "HF_", "CUDA_", "NCCL_", "TORCH", "OMP_", "MKL_", "MALLOC_")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
CREDENTIALS = re.compile(r"//[^/@\s]+@")  # inside a URL

Sections = dict[str, dict[str, str]]


def collect() -> Sections:
    """Returns names and values by section. Reads files and runs ``nvidia-smi``; no secrets."""
    return {
        "System": _system(),
        "Rayfin": {
            "version": __version__,
            "code": code_version(),
            "kernels": ", ".join(_kernels()) or "none compiled",
        },
        "Python": {"version": platform.python_version(), "executable": sys.executable}
        | {name: version for name in PACKAGES if (version := _version(name))},
        "CPU": _cpu(_text("/proc/cpuinfo")),
        "Memory": _memory(_text("/proc/meminfo")),
        "GPU": _gpus(),
        "Environment": variables(os.environ),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter here; of secret ones only that they are set."""
    return {
        name: "(set)"
        if any(word in name for word in SECRET)
        else CREDENTIALS.sub("//(set)@", value)
        for name, value in sorted(environment.items())
        if name.startswith(VARIABLES)
    }


def _system() -> dict[str, str]:
    release = dict(
        line.split("=", 1) for line in _text("/etc/os-release").splitlines() if "=" in line
    )
    return {
        "OS": release.get("PRETTY_NAME", platform.system()).strip('"'),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "compiler": _first_line("c++", "--version"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _kernels() -> list[str]:
    import rayfin.kernels

    folders = [Path(folder, "cpu") for folder in rayfin.kernels.__path__]
    files = (path for folder in folders for path in folder.glob("_*.so"))
    return sorted({path.name.partition(".")[0].lstrip("_") for path in files})


def _cpu(text: str) -> dict[str, str]:
    known: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    flags = set(known.get("flags", known.get("Features", "")).split())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "model": known.get("model name", platform.processor() or "unknown"),
        "cores": f"{os.cpu_count()}, of which {usable or os.cpu_count()} may be used",
        "instructions": " ".join(flag for flag in INSTRUCTIONS if flag in flags) or "unknown",
    }


def _memory(text: str) -> dict[str, str]:
    names = {"MemTotal": "total", "MemAvailable": "available"}
    sizes = (line.replace(":", "").split() for line in text.splitlines())
    memory = {
        names[size[0]]: f"{int(size[1]) / 2**20:.1f} GiB" for size in sizes if size[0] in names
    }
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _text(path).strip()
        if limit.isdigit() and int(limit) < 2**60:
            memory["limit of the container"] = f"{int(limit) / 2**30:.1f} GiB"
    return memory


def _gpus() -> dict[str, str]:
    query = "--query-gpu=name,memory.total,driver_version"
    lines = _output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    return {str(number): line for number, line in enumerate(lines)} or {"0": "none found"}


def _first_line(*command: str) -> str:
    return _output(*command).partition("\n")[0] or "none found"


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""

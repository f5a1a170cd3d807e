"""The wheel, in a fresh environment on a machine without a compiler."""

import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow(reason="builds a wheel, and compiles the kernels that are missing")
ROOT = Path(__file__).resolve().parents[2]
LOADED = (
    "import rayfin; from rayfin.kernels.cpu.library import load; print(rayfin.__file__, load())"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("auditwheel")
    into = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        # Kernels of this checkout, where they are of its sources: to compile them takes minutes.
        # test_wheel_aarch64.py compiles others.
        [sys.executable, "tools/wheel.py", "--into", str(into), "--kernels", "kernels/cpu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and what it depends on from this one: not its Rayfin."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    # A checkout on PYTHONPATH would pass for the Rayfin that is to be installed.
    alone = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True, env=alone)
    # A .pth file of a folder that a .pth file names is not read, such as the editable Rayfin's.
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture
def machine(fresh: Path) -> Mapping[str, str]:
    """Variables of a machine that has no compiler, and no Rayfin but the wheel's."""
    return {"PATH": f"{fresh}/bin", "PYTHONPATH": "", "CC": "false", "CXX": "false"}


def test_its_name_says_which_linux(wheel: Path) -> None:
    assert "manylinux_2" in wheel.name


def test_it_generates(fresh: Path, machine: Mapping[str, str], tmp_path: Path) -> None:
    def run(*command: str) -> str:
        environment = os.environ | machine
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    loaded = run(str(fresh / "bin" / "python"), "-c", LOADED)
    assert loaded.startswith(str(fresh)) and loaded.count(str(fresh)) == 2
    prompt = ("The capital of France is", "--max-tokens", "8", "--temperature", "0")
    assert "Paris" in run(str(fresh / "bin" / "rayfin"), "generate", *prompt)


def test_it_serves(
    fresh: Path, machine: Mapping[str, str], drive: Callable[..., Any], port: int
) -> None:
    rayfin = str(fresh / "bin" / "rayfin")
    flags = ("--port", str(port), "--threads", "1", "--kv-cache-memory", "64M")
    server = drive("serve", "demo", *flags, program=rayfin, **machine)
    server.wait_for("(Ctrl-C stops it)")
    question = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    reply = httpx.post(url, json=question, timeout=600).raise_for_status().json()
    assert reply["choices"][0]["message"]["content"] == "12 + 30 = 42"
    server.signal(signal.SIGINT, group=True)
    assert server.wait() == 0

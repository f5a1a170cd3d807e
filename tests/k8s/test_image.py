"""What the final stage of the Dockerfile holds, and where its caches are."""

import shutil
import subprocess
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_the_final_stage_has_a_compiler() -> None:
    """Triton compiles its driver stub at the first launch: without one no GPU engine starts."""
    final = (ROOT / "Dockerfile").read_text().rsplit("FROM ", 1)[1]
    install = final.split("apt-get install", 1)[1].split("&&", 1)[0].split()
    assert {"gcc", "libc6-dev"} <= set(install)


def test_tritons_driver_stub_compiles_with_that(tmp_path: Path) -> None:
    """With gcc, its assembler and linker alone, and the headers that triton and Python bring."""
    found = find_spec("triton")
    if found is None or found.origin is None or shutil.which("gcc") is None:
        pytest.skip("needs triton and gcc")
    nvidia = Path(found.origin).parent / "backends" / "nvidia"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("gcc", "as", "ld"):
        path = shutil.which(name)
        assert path is not None
        (tools / name).symlink_to(path)
    stub = tmp_path / "cuda_utils.so"
    include = [f"-I{nvidia / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    command = ["gcc", str(nvidia / "driver.c"), "-O1", "-shared", "-fPIC", "-Wno-psabi"]
    done = subprocess.run(
        [*command, *include, "-o", str(stub)],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert b"PyInit_cuda_utils" in stub.read_bytes()


def test_compiled_kernels_stay_on_the_volume_of_the_models() -> None:
    patches = yaml.safe_load((ROOT / "k8s/overlays/single-gpu/gpu.yaml").read_text())
    added = [patch["value"] for patch in patches if patch["path"].endswith("/env/-")]
    values = {entry["name"]: entry.get("value") for entry in added}
    assert Path(values["TRITON_CACHE_DIR"]).is_relative_to(values["HF_HOME"])

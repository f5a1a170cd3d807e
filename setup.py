"""Builds the CPU kernels, once per instruction set; everything else is in pyproject.toml.

Each library is optional: the installation skips it without a C++ compiler, or with one that does
not know the instruction set (AMX needs GCC 11 or Clang 12). The libraries are plain shared
libraries for ctypes and do not use Python's C interface.

RAYFIN_BUILD_ISAS=native builds those only that this machine can run best, in less time.
RAYFIN_BUILD_KERNELS=FOLDER takes libraries of these sources from the folder, and builds the others.
"""

import copy
import hashlib
import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("kernels/cpu")
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden"]
FLAGS += ["-g0"]  # Python's flags ask for debug information, which is half of the build time
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-pthread"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AMX = [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
NEON = ["-march=armv8.2-a+dotprod"]
ISAS: dict[str, list[str]] = {"portable": []}
if sysconfig.get_platform().endswith("x86_64"):  # of a cross build: the other machine's
    ISAS |= {"avx2": AVX2, "avx512": AVX512, "amx": AMX}
elif sysconfig.get_platform().endswith(("aarch64", "arm64")):
    ISAS |= {"neon": NEON}
# What /proc/cpuinfo calls the extensions of an instruction set
CPU_FLAGS = {"avx2": {"avx2", "fma", "f16c"}}
CPU_FLAGS["avx512"] = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
CPU_FLAGS["amx"] = {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"}
CPU_FLAGS["neon"] = {"asimddp"}


def wanted_isas() -> dict[str, list[str]]:
    """Those of ISAS that RAYFIN_BUILD_ISAS asks for: all, or what runs best on this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    if os.environ.get("RAYFIN_BUILD_ISAS", "all") != "native" or not cpuinfo.exists():
        return ISAS
    flags = set(cpuinfo.read_text().split())
    usable = [name for name in ISAS if CPU_FLAGS.get(name, set()) <= flags]
    # A machine may refuse AMX to a process, which then takes AVX-512. "portable" says what is best.
    plain = [name for name in usable if name != "amx"]
    names = {"portable", plain[-1], usable[-1]}
    return {name: own for name, own in ISAS.items() if name in names}


def files(*suffixes: str) -> list[Path]:
    """The C++ files of all folders, in the order of their names."""
    paths = (path for path in FOLDER.rglob("*") if path.suffix in suffixes)
    return sorted(paths, key=lambda path: path.name)


def source_hash() -> str:
    """Returns the hash that kernels/cpu/library.py compares."""
    digest = hashlib.sha256()
    for path in files(".cpp", ".h"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def built_before(name: str) -> Path | None:
    """The library of that name in RAYFIN_BUILD_KERNELS, if it is of these sources and flags."""
    folder = os.environ.get("RAYFIN_BUILD_KERNELS")
    path = Path(folder or ".", name)
    if not folder or not path.is_file() or source_hash().encode() not in path.read_bytes():
        return None
    # The flags are in this file alone.
    return path if path.stat().st_mtime > Path(__file__).stat().st_mtime else None


class BuildExt(build_ext):
    """Gives each extension its own folder for objects: all are built from the same sources."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        if (path := built_before(target.name)) is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.resolve() != target.resolve():
                shutil.copyfile(path, target)
            return
        builder = copy.copy(self)
        builder.build_temp = str(Path(self.build_temp, ext.name))
        build_ext.build_extension(builder, ext)


setup(
    cmdclass={"build_ext": BuildExt},
    options={"build_ext": {"parallel": os.cpu_count()}},
    ext_modules=[
        Extension(
            f"rayfin.kernels.cpu._{isa}",
            sources=[str(path) for path in files(".cpp")],
            depends=[str(path) for path in files(".h")],
            include_dirs=[str(FOLDER)],
            define_macros=[("RAYFIN_SOURCES", f'"{source_hash()}"')],
            extra_compile_args=[*FLAGS, *WARNINGS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for isa, flags in wanted_isas().items()
    ],
)

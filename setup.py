"""Builds the CPU kernels, once per instruction set; everything else is in pyproject.toml.

Each library is optional: without a C++ compiler, or with one that does not know an instruction set
(AMX: GCC 11, Clang 12), the installation goes on without it. They are plain shared libraries loaded
by ctypes, and use nothing of Python's C interface.
"""

import copy
import hashlib
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("kernels/cpu")
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden"]
FLAGS += ["-g0"]  # Python's own flags ask for debug information: half of the build's time
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-pthread"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AMX = [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
ISAS: dict[str, list[str]] = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISAS |= {"avx2": AVX2, "avx512": AVX512, "amx": AMX}


def source_hash() -> str:
    """As kernels/cpu/library.py makes it."""
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class BuildExt(build_ext):
    """Gives each extension a folder for its objects.

    Their sources have the same names, and side by side one would link the objects of another.
    """

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        build_ext.build_extension(own, ext)


setup(
    cmdclass={"build_ext": BuildExt},
    options={"build_ext": {"parallel": os.cpu_count()}},
    ext_modules=[
        Extension(
            f"rayfin.kernels.cpu._{isa}",
            sources=sorted(str(path) for path in FOLDER.glob("*.cpp")),
            depends=sorted(str(path) for path in FOLDER.glob("*.h")),
            define_macros=[("RAYFIN_SOURCES", f'"{source_hash()}"')],
            extra_compile_args=[*FLAGS, *WARNINGS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for isa, flags in ISAS.items()
    ],
)

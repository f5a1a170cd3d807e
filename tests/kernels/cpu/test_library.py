"""Which library is loaded, and what is said when none can be."""

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from rayfin.kernels.cpu import library
from rayfin.kernels.cpu.library import LibraryUnavailable


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYFIN_CPU_ISA", raising=False)


def test_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.path_of("portable").exists():
        pytest.skip("the CPU kernels are not built")
    with pytest.raises(LibraryUnavailable, match="'sse9'.*portable, avx2, avx512, amx"):
        library.load("sse9")
    monkeypatch.setenv("RAYFIN_CPU_ISA", "sse9")
    with pytest.raises(LibraryUnavailable, match="'sse9'"):
        library.load()


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.path_of("portable").exists():
        pytest.skip("the CPU kernels are not built")
    monkeypatch.setenv("RAYFIN_CPU_ISA", "portable")
    assert library.load() is library.load("portable")


def test_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library._open.cache_clear()
    library._warn_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert library.try_load() is None
            assert library.try_load() is None
    finally:
        library._open.cache_clear()
    assert [record.message for record in caplog.records] == [
        "the CPU kernels are not built: `make kernels`, or install with a C++ compiler; "
        "Rayfin computes with torch, several times slower"
    ]


def test_built_from_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library.path_of("portable").exists():
        pytest.skip("the CPU kernels are not built")
    monkeypatch.setattr(library, "source_hash", lambda: "0123")
    library._open.cache_clear()
    try:
        with pytest.raises(LibraryUnavailable, match="other sources"):
            library.load()
    finally:
        library._open.cache_clear()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_driver_of_the_sanitizers_compiles() -> None:
    """``make sanitize`` takes too long for each change of a struct that the driver fills."""
    root = Path(__file__).parents[3]
    flags = ["-fsyntax-only", "-std=c++17", "-I", "kernels/cpu"]
    subprocess.run(["g++", *flags, "tests/kernels/cpu/driver.cpp"], cwd=root, check=True)

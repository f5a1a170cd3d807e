"""Makes the scripts of benchmarks/ importable: they import each other by their bare names."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_server import FakeServer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "peers")]


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    with FakeServer().running() as server:
        yield server

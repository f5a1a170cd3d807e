"""Checks the types of the product, and of the tests' support."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow(reason="mypy reads the whole product")
def test_types() -> None:
    root = Path(__file__).parents[1]
    mypy = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=root, capture_output=True, text=True, check=False
    )
    assert mypy.returncode == 0, mypy.stdout + mypy.stderr

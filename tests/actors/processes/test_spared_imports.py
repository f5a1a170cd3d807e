"""Ray Serve is spared pandas, and nothing else is."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import rayfin.actors.processes.spared_imports
from ray.serve._private.utils import serve_encoders

assert serve_encoders
assert "pandas" not in sys.modules
import pandas

assert pandas.DataFrame({"a": [1]}).a.sum() == 1
"""


def test_serve_does_without_pandas_and_others_do_not() -> None:
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""``make chaos`` runs: one row of its table, on a cluster of its own."""

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "tools" / "chaos" / "run.py"


def test_a_row_is_held() -> None:
    """The only runner is killed amid streams, which continue on its spare as their oracles say."""
    command = [sys.executable, str(RUN), "--cases", "runner-spare", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "1 held, 0 broken" in done.stdout, done.stdout + done.stderr

"""Niceness, seen from a process of its own: a process cannot take its own back."""

import os
import subprocess
import sys

from rayfin.actors.processes.environment import BEHIND_RUNNERS

SCRIPT = """
import os
from rayfin.actors.processes.environment import lower_priority
before = os.nice(0)
lower_priority()
print(os.nice(0) - before)
"""


def test_a_process_steps_back() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert int(process.stdout) == min(BEHIND_RUNNERS, 19 - os.nice(0))

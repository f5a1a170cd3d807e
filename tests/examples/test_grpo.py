"""The demo model, with noise in its weights, learns to add again by rollouts on real Ray."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
LINE = re.compile(r"step \d+: reward (\S+), logprobs apart (\S+)")


@pytest.mark.thorough(reason="minutes; `make test` has test_trainers.py and e2e/test_rollouts.py")
def test_it_learns_though_runners_die(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "16", "--seed", "1", "--kills", "2"]
    environment = {**os.environ, "RAY_TMPDIR": "/tmp"}
    environment.pop("RAY_ADDRESS", None)
    run = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr[-2000:]
    steps = [(float(reward), float(apart)) for reward, apart in LINE.findall(run.stdout)]
    assert len(steps) == 16 and max(apart for _, apart in steps) <= 1e-5
    rewards = [reward for reward, _ in steps]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.2

import os
import subprocess
import sys

import pytest

from rayfin.actors.processes.environment import ENVIRONMENT, set_ray_environment


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_an_operators_word_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "environ", {name: "10"})
    set_ray_environment()
    assert os.environ == {**ENVIRONMENT, name: "10"}


def test_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_ray_environment()
    assert os.environ == ENVIRONMENT


def test_ray_prints_nothing_about_a_process_that_is_replaced() -> None:
    """Its lines about a dead worker reach a driver's terminal whatever ``log_to_driver`` says."""
    script = (
        "from ray._private.worker import print_to_stdstream\n"
        "for text in ('A worker died or was killed while executing a task', 'Something else'):\n"
        "    batch = {'lines': [text], 'pid': 'raylet', 'is_err': False}\n"
        "    print_to_stdstream(batch, ignore_prefix=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Something else" in done.stdout and "died" not in done.stdout

"""The program in place of Ray's agent: it lives as long as its raylet."""

import os
import subprocess
import sys

from rayfin.actors.processes import idle_agent

PARENT = """
import os, subprocess, sys
os.environ["RAY_RAYLET_PID"] = str(os.getpid())
agent = subprocess.Popen([sys.executable, sys.argv[1], "--any=flag"], stdin=subprocess.PIPE,
                         stdout=sys.stdout)
assert agent.poll() is None
print(agent.pid, flush=True)
sys.stdin.readline()
assert agent.poll() is None
os._exit(0)
"""


def ends_with_its_raylet(word: str) -> None:
    """The agent holds its parent's output: that ends when both have ended."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(idle_agent.__file__)],
        env={**os.environ, idle_agent.PIPE: word},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.read() == ""
    assert parent.wait() == 0


def test_it_ends_with_the_pipe_to_its_raylet() -> None:
    ends_with_its_raylet("1")


def test_it_ends_with_its_parent_where_there_is_no_pipe() -> None:
    ends_with_its_raylet("0")

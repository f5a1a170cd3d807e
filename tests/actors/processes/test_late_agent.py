"""The program in place of Ray's agent for runtime environments."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayfin.actors.processes import late_agent

AGENT = "import sys; print(*sys.argv[1:], sep='|')"
FLAGS = ["--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0", "--log-dir=a b"]


def started(folder: Path, piped: str) -> tuple["subprocess.Popen[str]", int]:
    """The program, and the port that it has written."""
    agent, port_file = folder / "agent.py", folder / "port"
    agent.write_text(AGENT)
    program = str(Path(late_agent.__file__))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", program, str(port_file), str(agent), *FLAGS],
        env={**os.environ, late_agent.PIPE: piped, "RAY_RAYLET_PID": str(os.getpid())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not port_file.exists():
        assert process.poll() is None
        time.sleep(0.01)
    return process, int(port_file.read_text())


@pytest.mark.parametrize("piped", ["0", "1"])
def test_it_becomes_the_agent_at_its_port_when_it_is_called(tmp_path: Path, piped: str) -> None:
    process, port = started(tmp_path, piped)
    socket.create_connection(("127.0.0.1", port)).close()
    output, _ = process.communicate()
    assert output.strip().split("|") == [
        FLAGS[0],
        f"--runtime-env-agent-port={port}",
        FLAGS[2],
    ]
    assert process.returncode == 0


def test_it_ends_with_the_pipe_to_its_raylet(tmp_path: Path) -> None:
    process, _ = started(tmp_path, "1")
    assert process.communicate()[0] == ""
    assert process.returncode == 0

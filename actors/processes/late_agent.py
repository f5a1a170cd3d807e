"""A program in place of Ray's agent for runtime environments, which it becomes when it is called.

    python -I -S late_agent.py PORT_FILE main.py ARGUMENTS

A raylet takes no work before that agent has written its port, after seconds of imports, and no
actor of Rayfin's has a runtime environment. This program imports no Ray. It writes a port, and
becomes Ray's agent at this port when something connects. The raylet connects again.
"""

import os
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

PIPE = "RAY_enable_pipe_based_agent_to_parent_health_check"
"""The raylet's word, in the environment, for whether the end of stdin is its own."""

ADDRESS, PORT = "--node-ip-address=", "--runtime-env-agent-port="
"""Flags of Ray's agent."""


def await_call(address: str, port: int, port_file: Path, parent: int) -> int:
    """Waits until something connects, or the raylet, whose process id is ``parent``, has ended.

    Args:
        port: 0 is any. The file gets the one that it is.

    Returns:
        The port that was called, 0 if the raylet has ended.
    """
    family, kind, number, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, number) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        port = listener.getsockname()[1]
        part = port_file.with_name(f"{port_file.name}.{os.getpid()}")
        part.write_text(str(port))
        part.replace(port_file)
        piped = os.environ.get(PIPE) == "1"
        watched = [listener, sys.stdin] if piped else [listener]
        while piped or os.getppid() == parent:
            # Without a pipe as often as Ray's agent looks for its raylet.
            ready = select.select(watched, [], [], None if piped else 0.4)[0]
            if listener in ready:
                return port
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1 << 10):
                break
    return 0


def value(words: Sequence[str], flag: str) -> str:
    """The value of a flag, which ends with its sign of equality."""
    return next(word[len(flag) :] for word in words if word.startswith(flag))


def main(port_file: Path, words: Sequence[str]) -> None:
    address, port = value(words, ADDRESS), int(value(words, PORT) or 0)
    called = await_call(address, port, port_file, int(os.environ["RAY_RAYLET_PID"]))
    if called:
        at_port = [f"{PORT}{called}" if word.startswith(PORT) else word for word in words]
        os.execv(sys.executable, [sys.executable, "-u", *at_port])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

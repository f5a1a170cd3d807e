"""A program: the agent of a raylet that needs none. It imports no Ray, and sleeps until that ends.

A raylet starts an agent beside itself, which measures the machine and its processes for a
dashboard, and waits for its ports before it takes work: two seconds of imports. It also ends when
its agent does. ``own_ray.py`` starts this program in its place, with the arguments of Ray's, where
no program reads what the agent would report.
"""

import os
import signal
import sys
import time

PIPE = "RAY_enable_pipe_based_agent_to_parent_health_check"
"""The raylet's word, in the environment, for whether the end of stdin is its own."""


def await_end(parent: int) -> None:
    """Returns when the raylet, whose process id is ``parent``, has ended."""
    if os.environ.get(PIPE) == "1":
        sys.stdin.buffer.read()
    else:
        while os.getppid() == parent:
            time.sleep(0.4)  # as often as Ray's agent looks


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group
    await_end(int(os.environ["RAY_RAYLET_PID"]))

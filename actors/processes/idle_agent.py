"""A program in place of a raylet's agent: it imports no Ray, and sleeps until the raylet ends.

A raylet starts an agent, which measures the machine and its processes for a dashboard. The raylet
takes no work before the agent has opened its ports, after two seconds of imports, and the raylet
ends when the agent ends. Where no program reads what the agent would report, ``own_ray.py`` has the
raylet start this program instead, with the agent's arguments.
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

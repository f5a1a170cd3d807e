"""Identities of processes: the process id with its start time, because ids are reused."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from rayfin.actors.timing import PROCESS_KILL_SECONDS, PROCESS_POLL_SECONDS


@dataclass(frozen=True, slots=True)
class Process:
    """One process of one node."""

    node: str  # Ray's id of the node
    pid: int
    started: int  # kernel ticks since boot; 0 if the system does not report them


def this_process(node: str) -> Process:
    """Returns the calling process, which runs on ``node``."""
    state, started = _stat(os.getpid()) or ("R", 0)
    return Process(node, os.getpid(), started)


def is_alive(process: Process) -> bool:
    """Whether a process of this node is alive; a zombie is not."""
    if not process.started:
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return False
        return True
    stat = _stat(process.pid)
    return stat is not None and stat[0] not in "ZX" and stat[1] == process.started


def is_stopped(process: Process) -> bool:
    """Whether a signal has stopped a process of this node, so that it answers no call."""
    stat = _stat(process.pid)
    return stat is not None and stat[0] in "Tt" and stat[1] == process.started


def end(process: Process, seconds: float = PROCESS_KILL_SECONDS) -> bool:
    """Kills a process of this node. Returns True once it is gone and its memory is free."""
    deadline = time.monotonic() + seconds
    while is_alive(process):
        if time.monotonic() > deadline:
            return False
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        time.sleep(PROCESS_POLL_SECONDS)
    return True


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start time) as Linux reports them, or None without such a process or /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # a name in brackets may hold anything
    return fields[0], int(fields[19])

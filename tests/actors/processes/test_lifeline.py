"""Actors exit when their lease runs out; a process differs from a later one with its id."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

from rayfin.actors.processes.identity import end, is_alive, this_process
from rayfin.actors.processes.lifeline import Lifeline


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_silence_grows_until_somebody_is_heard_of() -> None:
    clock = Clock()
    line = Lifeline(10.0, lambda: None, clock)
    clock.now = 9.0
    assert line.silence == 9.0 and not line.is_cut()
    line.heard()
    clock.now = 18.0
    assert not line.is_cut()
    clock.now = 19.5
    assert line.is_cut()


def test_work_is_no_silence() -> None:
    clock = Clock()
    line = Lifeline(10.0, lambda: None, clock)
    with line.work(), line.work():
        clock.now = 1000.0
        assert line.silence == 0.0 and not line.is_cut()
    assert not line.is_cut()  # it begins when the work ends
    clock.now = 1011.0
    assert line.is_cut()


def test_cut_is_told_once_watched() -> None:
    clock, is_cut = Clock(), threading.Event()
    line = Lifeline(10.0, is_cut.set, clock)
    clock.now = 11.0
    line.watch()
    assert is_cut.wait(30)


def test_processes_end_and_are_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = this_process("here")
    started = open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[19]
    process = replace(own, pid=child.pid, started=int(started))
    assert is_alive(own) and is_alive(process)
    assert not is_alive(replace(process, started=process.started + 1))  # another one, later
    os.kill(child.pid, signal.SIGSTOP)  # a hung one does not listen to anything milder
    assert end(process)
    assert not is_alive(process)  # a zombie
    assert child.wait() == -signal.SIGKILL
    assert end(process)  # nothing to do

"""The warden's helper where children are slow to end, and where there is no idle priority."""

import os
import select
import socket
import subprocess
import sys
import time

import pytest

from rayfin.deployments.guidance import warden_process as module
from rayfin.deployments.guidance.warden_process import FrameBuffer, Helper, _Task

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes do not fork")


def said(link: socket.socket) -> list[dict[str, object]]:
    """What the helper has sent."""
    frames = FrameBuffer()
    data = link.recv(2**20) if select.select([link], [], [], 0)[0] else b""
    return list(frames.push(data))


def test_children_that_end_slowly_stop_no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[int] = []
    monkeypatch.setattr(Helper, "_fork", lambda own, task, *how: forked.append(task.number))
    ours, link = socket.socketpair()
    with ours, link:
        helper = Helper(link)
        most = module.MAX_LEAVING
        slow = [subprocess.Popen(["sleep", "60"]) for _ in range(most + 1)]
        helper._leaving = [process.pid for process in slow]
        try:
            for number in (1, 2, 3):
                helper._begin(_Task(number, "", None))
            helper._look_after_children()  # its last tick is long ago
            assert forked == [] and len(helper._leaving) == most + 1
            assert said(ours) == [{"tick": 3}]
            patience = helper._patience()
            assert patience is not None and patience <= module.WARDEN_REAP_SECONDS * 1000

            monkeypatch.setattr(module, "GRAMMAR_STARVED_SECONDS", -1.0)
            helper._waiting.pop()
            helper._waiting.pop()
            helper._look_after_children()
            assert said(ours) == [{"id": 1, "kind": module.STARVED, "reason": ""}]

            helper._begin(_Task(4, "", None))
            assert said(ours)[0]["id"] == 4
            monkeypatch.undo()
            monkeypatch.setattr(Helper, "_fork", lambda own, task, *how: forked.append(task.number))
            helper._begin(_Task(5, "", None))
            slow[0].kill()
            until = time.monotonic() + 30
            while not forked and time.monotonic() < until:
                helper._look_after_children()
                time.sleep(0.01)
            assert forked == [5] and len(helper._leaving) == most
        finally:
            for process in slow:
                process.kill()
                process.wait()


@pytest.mark.parametrize(
    ("idle", "possible", "niceness"),
    [(True, True, module.SHARE_NICENESS), (True, False, 19), (False, True, module.SHARE_NICENESS)],
)
def test_a_child_steps_back(
    idle: bool, possible: bool, niceness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str | int] = []

    def only_when_idle() -> bool:
        calls.append("idle")
        return possible

    monkeypatch.setattr(module, "only_when_idle", only_when_idle)
    monkeypatch.setattr(os, "nice", calls.append)
    module.step_back(idle)
    assert calls == (["idle"] if idle else []) + [niceness]

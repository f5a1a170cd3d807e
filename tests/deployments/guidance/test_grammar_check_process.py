"""The checker's helper where children are slow to end, and where there is no idle priority."""

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rayfin.deployments.guidance import grammar_check_process as module
from rayfin.deployments.guidance.grammar_check_process import FrameBuffer, Helper, _Child, _Task

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes do not fork")


def said(link: socket.socket) -> list[dict[str, object]]:
    """What the helper has sent."""
    frames = FrameBuffer()
    data = link.recv(2**20) if select.select([link], [], [], 0)[0] else b""
    return list(frames.push(data))


def soon(work: Callable[..., Any], *given: Any) -> bool:
    """Whether it ends: what stands still for ever fails its test."""
    thread = threading.Thread(target=work, args=given, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def test_an_event_of_an_earlier_child_is_no_wait() -> None:
    """A new child has the descriptor of one that has ended, whose own event comes late."""
    ours, link = socket.socketpair()
    near, far = socket.socketpair()
    with ours, link, near, far, subprocess.Popen(["sleep", "60"]) as process:
        helper = Helper(link)
        now = time.monotonic()
        child = _Child(near, _Task(1, "", None), True, True, process.pid, now, now + 60)
        helper._children[near.fileno()] = child
        helper._poll.register(near, select.POLLIN)
        try:
            assert soon(helper._read, near.fileno())
            assert said(ours) == [] and helper._children[near.fileno()] is child
            far.sendall(module.frame({"kind": "ok", "reason": ""}))
            helper._read(near.fileno())
            assert said(ours) == [{"id": 1, "kind": "ok", "reason": ""}]
        finally:
            process.kill()


@pytest.mark.parametrize("length", [2**10, 2**22])
def test_a_spare_that_is_stopped_holds_nothing_up(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing: what its socket does not take goes to a new child."""
    ours, link = socket.socketpair()
    near, far = socket.socketpair()
    stopped, new = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    with ours, link, near, far:
        helper = Helper(link)
        now = time.monotonic()
        first, task = _Task(1, "", None), _Task(2, "x" * length, None)
        spare = _Child(near, first, True, True, stopped.pid, now, now + 60)
        helper._spares[near.fileno()] = spare
        helper._poll.register(near, select.POLLIN)
        monkeypatch.setattr(os, "fork", lambda: new.pid)
        try:
            assert soon(helper._begin, task)
            (child,) = helper._children.values()
            assert not helper._spares and child.task is task
            assert child.pid == (stopped if length < 2**16 else new).pid
        finally:
            helper.close()
            for process in (stopped, new):
                process.kill()
                process.wait()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_grammar_that_killed_a_helper_has_a_new_child(
    fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, link = socket.socketpair()
    near, far = socket.socketpair()
    spare, new = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    with ours, link, near, far:
        helper = Helper(link)
        now = time.monotonic()
        waiting = _Child(near, _Task(1, "", None), True, True, spare.pid, now, now + 60)
        helper._spares[near.fileno()] = waiting
        helper._poll.register(near, select.POLLIN)
        monkeypatch.setattr(os, "fork", lambda: new.pid)
        try:
            task = {"id": 2, "text": "a", "plain": False, "form": None, "fresh": fresh}
            ours.sendall(module.frame(task))
            assert helper._receive()
            (child,) = helper._children.values()
            assert child.pid == (new if fresh else spare).pid
            assert list(helper._spares.values()) == [waiting] * fresh
        finally:
            helper.close()
            for process in (spare, new):
                process.kill()
                process.wait()


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
            assert patience is not None and patience <= module.CHECKER_REAP_SECONDS * 1000

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


@pytest.mark.parametrize("possible", [True, False])
def test_a_child_gives_way(possible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def only_when_idle(pid: int) -> bool:
        calls.append(("idle", pid))
        return possible

    monkeypatch.setattr(module, "only_when_idle", only_when_idle)
    monkeypatch.setattr(os, "nice", calls.append)
    monkeypatch.setattr(os, "setpriority", lambda *given: calls.append(given))
    module.step_back()
    assert calls == [module.SHARE_NICENESS]
    module.give_way(77)
    assert calls[1:] == [("idle", 77), *([] if possible else [(os.PRIO_PROCESS, 77, 19)])]


def test_a_child_has_a_share_while_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has had its time, or has waited for it; then idle time, and at last a new child."""
    began: list[tuple[int, bool]] = []
    gave_way: list[int] = []
    had = [0.0]
    monkeypatch.setattr(module, "give_way", gave_way.append)
    monkeypatch.setattr(Helper, "_end", lambda own, descriptor: own._children.pop(descriptor))
    monkeypatch.setattr(
        Helper, "_begin", lambda own, task, idle, started: began.append((task.number, idle))
    )
    monkeypatch.setattr(_Child, "cpu_seconds", lambda own: had[0])
    ours, link = socket.socketpair()
    with ours, link:
        helper = Helper(link)
        now = time.monotonic()
        for number, started in enumerate((now, now - module.GRAMMAR_SHORT_MOST_SECONDS)):
            task = _Task(number, "", None)
            helper._children[number] = _Child(link, task, True, True, 10 + number, started, now)
        helper._end_late_children()
        short, late = helper._children.values()
        assert gave_way == [11] and short.short and not late.short
        assert min(short.deadline, late.deadline) > now
        had[0], short.deadline = module.GRAMMAR_SHORT_SECONDS, now
        helper._end_late_children()
        assert gave_way == [11, 10] and not short.short and short.deadline > late.deadline
        late.deadline = now
        helper._end_late_children()
        assert began == [(1, False)] and list(helper._children) == [0]

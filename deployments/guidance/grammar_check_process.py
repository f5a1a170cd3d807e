"""The checker's helper: compiles unknown grammars away from requests. ``python -m`` runs it.

It has one thread, so that it may fork: a grammar that is not plain compiles in a child with limits
of its own, which may hang or die. A child that answers soon takes the next one: a fork costs more
than most grammars, since each page that a child writes is copied first. The helper serves one
socket and ends with it. All messages are JSON after their length:

    ingress ── tokenizer, vocab_size, ends, bos ──────────► helper     once; tokens, max_bytes too
            ◄── ready ─────────────────────────────────────
            ── id, text, plain, form, fresh ──────────────►            for each grammar
            ◄── id, kind, reason, quick | tick ────────────            tick: it lives and has work

With a ``form`` the text is that of a form, whose path it is: a child makes the grammar, and the
answer has it, or why the form is refused. A ``fresh`` one has a new child, which takes no other
before it: a helper has died with it.
"""

import contextlib
import ctypes
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.grammar_limits import ll_tokenizer_from
from rayfin.actors.processes.environment import lower_priority, only_when_idle
from rayfin.actors.timing import (
    CHECKER_REAP_SECONDS,
    CHECKER_SPARE_SECONDS,
    CHECKER_TICK_SECONDS,
    GRAMMAR_CHECK_CPU_SECONDS,
    GRAMMAR_CHECK_SECONDS,
    GRAMMAR_CPU_LIMIT_SECONDS,
    GRAMMAR_IDLE_SECONDS,
    GRAMMAR_SHORT_MOST_SECONDS,
    GRAMMAR_SHORT_SECONDS,
    GRAMMAR_STARVED_SECONDS,
)
from rayfin.deployments.guidance.compile_check import Verdict, judge
from rayfin.deployments.guidance.grammar import form_from, make_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LENGTH = struct.Struct(">I")
CHILD_MEMORY = 2**30  # bytes beyond what the helper has
CHILD_STACK = 4 * 2**20  # bytes; threads of a runner have twice as much for the same grammar
SHARE_NICENESS = 4  # beyond the helper's, of a child that has a share of the processor
STARVED = "starved"  # a child that got no processor time: no verdict
DIED = {"kind": "too_complex", "reason": "it takes too much time or memory"}
PR_SET_PDEATHSIG = 1
LAST_NICENESS = 19  # of a child where the system has no priority for idle time
MOST_TASKS = 64  # of a child, whose memory may grow
MAX_LEAVING = 4  # killed children whose memory is not free yet; beyond it none begins


def frame(message: dict[str, Any]) -> bytes:
    """Returns a message as it travels."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes as they come, to whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            end = LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield json.loads(body)


@dataclass(slots=True, frozen=True)
class _Task:
    """A grammar, or a form that one is made from."""

    number: int
    text: str
    form: str | None  # its path in the request
    fresh: bool = False  # only a new child computes it


@dataclass(slots=True, frozen=True)
class _Waiting:
    """A task that no child computes yet."""

    task: _Task
    idle: bool
    started: float | None
    since: float


@dataclass(slots=True)
class _Child:
    """A process that compiles a grammar, or waits for its next one."""

    link: socket.socket
    task: _Task
    idle: bool  # it computes while the processor is idle, once it is not short
    short: bool  # it has a share of the processor, for a while
    pid: int
    started: float  # the first child of this grammar
    deadline: float
    frames: FrameBuffer = field(default_factory=FrameBuffer)
    tasks: int = 1
    before: float = 0.0  # processor time of its earlier grammars

    def cpu_seconds(self) -> float:
        """Processor time of this grammar; where the system does not say it, it was enough."""
        return self._whole_cpu_seconds() - self.before

    def begin(self, task: _Task, now: float) -> None:
        """Has it compile one more.

        Raises:
            OSError: it has died, or it does not take the whole task at once.
        """
        self.task, self.tasks = task, self.tasks + 1
        self.started, self.deadline = now, now + GRAMMAR_SHORT_SECONDS
        self.before = self._whole_cpu_seconds()
        data = frame(_written(task))
        # The helper waits for no child: a spare may have been stopped.
        if self.link.send(data, socket.MSG_DONTWAIT) < len(data):
            raise BlockingIOError("the task is longer than the socket takes")

    def _whole_cpu_seconds(self) -> float:
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return math.inf
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Helper:
    """Serves one socket until it closes."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._frames = FrameBuffer()
        self._children: dict[int, _Child] = {}  # by the socket to each
        self._spares: dict[int, _Child] = {}  # that compile nothing
        self._leaving: list[int] = []  # processes
        self._waiting: deque[_Waiting] = deque()  # for them
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._ticked = 0.0
        self._tokenizer: LLTokenizer
        self._max_bytes = 0  # of a form
        self._special_tokens: dict[str, int] = {}

    def serve(self) -> None:
        setup = self._first_message()
        self._tokenizer = ll_tokenizer_from(
            setup.pop("tokenizer"), setup["vocab_size"], setup["ends"], setup["bos"]
        )
        self._max_bytes, self._special_tokens = setup["max_bytes"], setup["special_tokens"]
        gc.collect()
        gc.freeze()  # children do not copy what they do not change
        self._send({"ready": os.getpid()})
        while True:
            for descriptor, _ in self._poll.poll(self._patience()):
                if descriptor in self._children:
                    self._read(descriptor)
                elif descriptor in self._spares:
                    self._end(descriptor)  # it has died
                elif not self._receive():
                    return
            self._look_after_children()

    def close(self) -> None:
        for descriptor in [*self._children, *self._spares]:
            self._end(descriptor)

    def _look_after_children(self) -> None:
        """Waits for none: a helper that says nothing is ended."""
        self._end_late_children()
        self._reap()
        self._start_waiting()
        work = len(self._children) + len(self._waiting)
        if work and time.monotonic() - self._ticked > CHECKER_TICK_SECONDS:
            self._send({"tick": work})

    def _first_message(self) -> dict[str, Any]:
        while True:
            data = self._link.recv(2**20)
            if not data:
                raise EOFError
            for message in self._frames.push(data):
                return message

    def _receive(self) -> bool:
        data = self._link.recv(2**20)
        for message in self._frames.push(data):
            if message["plain"]:
                self._answer(message["id"], _said(judge(self._tokenizer, message["text"])))
            else:
                fields = (message[name] for name in ("id", "text", "form", "fresh"))
                self._begin(_Task(*fields))
        return bool(data)

    def _begin(self, task: _Task, idle: bool = True, started: float | None = None) -> None:
        self._waiting.append(_Waiting(task, idle, started, time.monotonic()))
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Starts children of what waits, where few are leaving."""
        while self._waiting and len(self._leaving) <= MAX_LEAVING:
            first = self._waiting.popleft()
            self._fork(first.task, first.idle, first.started)
        late = time.monotonic() - GRAMMAR_STARVED_SECONDS
        while self._waiting and self._waiting[0].since < late:
            self._answer(self._waiting.popleft().task.number, {"kind": STARVED, "reason": ""})

    def _fork(self, task: _Task, idle: bool, started: float | None) -> None:
        """Has a new child compile the grammar, or for its first try one that waits."""
        now = time.monotonic()
        while idle and self._spares and not task.fresh:
            descriptor, spare = self._spares.popitem()
            self._children[descriptor] = spare
            try:
                spare.begin(task, now)
                return
            except OSError:
                self._end(descriptor)
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for other in (self._link.fileno(), ours.fileno(), *self._children, *self._spares):
                os.close(other)
            _compute_and_exit(self._compile, task, theirs, parent)
        theirs.close()
        patience = GRAMMAR_SHORT_SECONDS if idle else GRAMMAR_CHECK_SECONDS
        child = _Child(ours, task, idle, idle, pid, started or now, now + patience)
        self._children[ours.fileno()] = child
        self._poll.register(ours, select.POLLIN)

    def _compile(self, task: _Task) -> dict[str, Any]:
        """What to answer; runs in a child."""
        if task.form is None:
            return _said(judge(self._tokenizer, task.text))
        try:
            grammar = make_grammar(
                form_from(task.text),
                task.form,
                special_tokens=self._special_tokens,
                max_bytes=self._max_bytes,
            )
        except InvalidRequest as error:
            refusal = (error.message, error.param, error.code)
            return {"kind": "invalid", "reason": "", "refusal": refusal}
        parts = (grammar.text, grammar.kind, grammar.unenforced)
        return {**_said(judge(self._tokenizer, grammar.text)), "grammar": parts}

    def _read(self, descriptor: int) -> None:
        child = self._children[descriptor]
        try:
            data = child.link.recv(2**16, socket.MSG_DONTWAIT)
            said = next(child.frames.push(data), None) if data else DIED
        except BlockingIOError:  # the event was of an earlier child, which had this descriptor
            return
        except (OSError, ValueError):
            said = DIED
        if said is None:
            return
        number = child.task.number
        if said is DIED or not child.short or child.tasks >= MOST_TASKS:
            self._end(descriptor)
        else:  # no priority was taken from it, which it could not get back
            self._spares[descriptor] = self._children.pop(descriptor)
            child.deadline = time.monotonic() + CHECKER_SPARE_SECONDS
        if said is DIED and child.tasks > 1:  # perhaps of an earlier grammar, or while it waited
            self._begin(child.task, False, child.started)
        else:
            self._answer(number, said)

    def _end_late_children(self) -> None:
        """A child that is silent for too long is at fault if it has had the time to compute.

        Where others take all of the processor it has had none: another child begins again, with a
        share of the processor.
        """
        now = time.monotonic()
        for descriptor, spare in list(self._spares.items()):
            if now >= spare.deadline:
                self._end(descriptor)
        for descriptor, child in list(self._children.items()):
            if now < child.deadline:
                continue
            seconds, waited = child.cpu_seconds(), now - child.started
            if child.short:
                if seconds >= GRAMMAR_SHORT_SECONDS or waited >= GRAMMAR_SHORT_MOST_SECONDS:
                    child.short = False
                    give_way(child.pid)
                child.deadline = now + (
                    GRAMMAR_SHORT_SECONDS if child.short else GRAMMAR_IDLE_SECONDS
                )
                continue
            computed = seconds >= GRAMMAR_CHECK_CPU_SECONDS
            if computed and waited < GRAMMAR_CHECK_SECONDS:
                child.deadline = child.started + GRAMMAR_CHECK_SECONDS
                continue
            if not (computed or child.idle) and waited < GRAMMAR_STARVED_SECONDS:
                child.deadline = now + CHECKER_TICK_SECONDS
                continue
            self._end(descriptor)
            if child.idle and not computed:
                self._begin(child.task, False, child.started)
            elif computed:
                self._answer(child.task.number, DIED)
            else:
                self._answer(child.task.number, {"kind": STARVED, "reason": ""})

    def _end(self, descriptor: int) -> None:
        child = (self._children if descriptor in self._children else self._spares).pop(descriptor)
        self._poll.unregister(descriptor)
        child.link.close()
        os.kill(child.pid, signal.SIGKILL)
        self._leaving.append(child.pid)
        self._reap()

    def _reap(self) -> None:
        """Forgets children that have ended. The kernel frees their memory at their pace."""
        self._leaving = [pid for pid in self._leaving if os.waitpid(pid, os.WNOHANG)[0] == 0]

    def _patience(self) -> float | None:
        """Milliseconds until something is due; None without children."""
        processes = [*self._children.values(), *self._spares.values()]
        if not (processes or self._leaving):  # what waits does so for the latter
            return None
        due = min((child.deadline for child in processes), default=math.inf)
        tick = CHECKER_REAP_SECONDS if self._waiting else CHECKER_TICK_SECONDS
        return max(0.0, min(due - time.monotonic(), tick)) * 1000

    def _answer(self, number: int, said: dict[str, Any]) -> None:
        self._send({"id": number, **said})

    def _send(self, message: dict[str, Any]) -> None:
        self._ticked = time.monotonic()
        self._link.sendall(frame(message))


def _said(verdict: Verdict) -> dict[str, Any]:
    return {"kind": verdict.kind, "reason": verdict.reason, "quick": verdict.quick}


def _written(task: _Task) -> dict[str, Any]:
    return {"number": task.number, "text": task.text, "form": task.form}


def _compute_and_exit(
    work: Callable[[_Task], dict[str, Any]], task: _Task, link: socket.socket, parent: int
) -> NoReturn:
    """Runs in a child; sends what ``work`` returns for the task, and for those that come."""
    try:
        die_with_parent()
        if os.getppid() != parent:  # it has ended meanwhile
            os._exit(0)
        step_back()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of the library quotes the grammar
        with open("/proc/self/statm") as file:
            memory = int(file.read().split()[0]) * resource.getpagesize() + CHILD_MEMORY
        for limit, size in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_STACK, CHILD_STACK),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (size, size))
        frames = FrameBuffer()
        while True:
            seconds = math.ceil(time.process_time()) + GRAMMAR_CPU_LIMIT_SECONDS
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(
                resource.RLIMIT_CPU,
                (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard),
            )
            link.sendall(frame(work(task)))
            while (message := next(frames.push(data := link.recv(2**20)), None)) is None and data:
                pass
            if message is None:
                break
            task = _Task(**message)
    finally:
        os._exit(0)


def step_back() -> None:
    """Lowers the priority of a child below the helper's."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(SHARE_NICENESS)


def give_way(pid: int) -> None:
    """Has a child compute in idle time from now on."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it, or the child has ended
        if not only_when_idle(pid):
            os.setpriority(os.PRIO_PROCESS, pid, LAST_NICENESS)


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(descriptor: int, parent: int) -> None:
    """Serves the socket ``descriptor`` of the process ``parent``."""
    die_with_parent()
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    lower_priority()
    helper = Helper(socket.socket(fileno=descriptor))
    try:
        helper.serve()
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    finally:
        helper.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

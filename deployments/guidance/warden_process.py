"""The warden's helper: compiles unknown grammars away from requests. ``python -m`` runs it.

It has one thread, so that it may fork: each grammar that is not plain compiles in a child with
limits of its own, which may hang or die. It serves one socket and ends with it. All messages are
JSON after their length:

    ingress ── tokenizer, vocab_size, ends, bos ──────────► helper     once
            ◄── ready ─────────────────────────────────────
            ── id, text, plain ───────────────────────────►            for each grammar
            ◄── id, kind, reason | tick ───────────────────            tick: it lives and has work
"""

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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rayfin.actors.grammar_limits import ll_tokenizer_from
from rayfin.actors.processes.environment import lower_priority
from rayfin.actors.timing import (
    GRAMMAR_CHECK_CPU_SECONDS,
    GRAMMAR_CHECK_SECONDS,
    GRAMMAR_CPU_LIMIT_SECONDS,
    GRAMMAR_STARVED_SECONDS,
    WARDEN_TICK_SECONDS,
)
from rayfin.deployments.guidance.verdicts import Verdict, judge

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LENGTH = struct.Struct(">I")
CHILD_MEMORY = 2**30  # bytes beyond what the helper has
CHILD_NICENESS = 19
STARVED = "starved"  # a child that got no processor time: no verdict
DIED = Verdict("too_complex", "it takes too much time or memory")
PR_SET_PDEATHSIG = 1


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


@dataclass(slots=True)
class _Child:
    """A process that compiles one grammar."""

    number: int  # of the grammar
    text: str
    niceness: int  # beyond the helper's
    pid: int
    started: float  # the first child of this grammar
    deadline: float
    said: bytes = b""

    def cpu_seconds(self) -> float:
        """Processor time so far; where the system does not say it, it was enough."""
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
        self._children: dict[int, _Child] = {}  # by the pipe that each writes its verdict to
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._ticked = 0.0
        self._tokenizer: LLTokenizer

    def serve(self) -> None:
        setup = self._first_message()
        self._tokenizer = ll_tokenizer_from(
            setup.pop("tokenizer"), setup["vocab_size"], setup["ends"], setup["bos"]
        )
        gc.collect()
        gc.freeze()  # children do not copy what they do not change
        self._send({"ready": os.getpid()})
        while True:
            for descriptor, _ in self._poll.poll(self._patience()):
                if descriptor in self._children:
                    self._read(descriptor)
                elif not self._receive():
                    return
            self._end_late_children()
            if self._children and time.monotonic() - self._ticked > WARDEN_TICK_SECONDS:
                self._send({"tick": len(self._children)})

    def close(self) -> None:
        for descriptor in list(self._children):
            self._end(descriptor)

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
                self._answer(message["id"], judge(self._tokenizer, message["text"]))
            else:
                self._fork(message["id"], message["text"])
        return bool(data)

    def _fork(
        self, number: int, text: str, niceness: int = CHILD_NICENESS, started: float | None = None
    ) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (self._link.fileno(), reading, *self._children):
                os.close(descriptor)
            _compile_and_exit(self._tokenizer, text, niceness, writing)
        os.close(writing)
        now = time.monotonic()
        self._children[reading] = _Child(
            number, text, niceness, pid, started or now, now + GRAMMAR_CHECK_SECONDS
        )
        self._poll.register(reading, select.POLLIN)

    def _read(self, descriptor: int) -> None:
        child = self._children[descriptor]
        data = os.read(descriptor, 2**16)
        child.said += data
        if not data:
            self._end(descriptor)
            try:
                verdict = Verdict(*json.loads(child.said))
            except ValueError:
                verdict = DIED
            self._answer(child.number, verdict)

    def _end_late_children(self) -> None:
        """A child that is silent for too long is at fault if it has had the time to compute.

        Where others take all of the processor it has had none: half-way another child begins
        again, with the priority of the helper.
        """
        now = time.monotonic()
        for descriptor, child in list(self._children.items()):
            if now < child.deadline:
                continue
            computed = child.cpu_seconds() >= GRAMMAR_CHECK_CPU_SECONDS
            waited = now - child.started
            again = child.niceness > 0 and waited >= GRAMMAR_STARVED_SECONDS / 2
            if not (computed or again) and waited < GRAMMAR_STARVED_SECONDS:
                child.deadline = now + WARDEN_TICK_SECONDS
                continue
            self._end(descriptor)
            if again and not computed:
                self._fork(child.number, child.text, 0, child.started)
            elif computed:
                self._answer(child.number, DIED)
            else:
                self._send({"id": child.number, "kind": STARVED, "reason": ""})

    def _end(self, descriptor: int) -> None:
        child = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)

    def _patience(self) -> float | None:
        """Milliseconds until something is due; None without children."""
        if not self._children:
            return None
        due = min(child.deadline for child in self._children.values())
        return max(0.0, min(due - time.monotonic(), WARDEN_TICK_SECONDS)) * 1000

    def _answer(self, number: int, verdict: Verdict) -> None:
        self._send({"id": number, "kind": verdict.kind, "reason": verdict.reason})

    def _send(self, message: dict[str, Any]) -> None:
        self._ticked = time.monotonic()
        self._link.sendall(frame(message))


def _compile_and_exit(tokenizer: "LLTokenizer", text: str, niceness: int, writing: int) -> NoReturn:
    """Runs in a child."""
    try:
        die_with_parent()
        os.nice(niceness)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of the library quotes the grammar
        with open("/proc/self/statm") as file:
            memory = int(file.read().split()[0]) * resource.getpagesize() + CHILD_MEMORY
        for limit, most in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_CPU, GRAMMAR_CPU_LIMIT_SECONDS),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (most, most))
        os.write(writing, json.dumps(judge(tokenizer, text)).encode())
    finally:
        os._exit(0)


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

"""The checker of an ingress: unknown grammars are checked in a process that may hang or die.

A form that takes long to read becomes a grammar there as well. The event loop only awaits. A
verdict is known afterwards, so that a grammar is checked once. One socket leads to the helper
(``grammar_check_process.py``), which is replaced when it dies or says nothing.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.errors import EngineUnavailable, InvalidRequest, Overloaded, RayfinError
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.actors.timing import (
    CHECKER_RESTART_PAUSE_SECONDS,
    CHECKER_SILENT_SECONDS,
    CHECKER_START_SECONDS,
    RETRY_AFTER_SECONDS,
)
from rayfin.deployments.guidance.compile_check import DigestCache, Verdict, VerdictCache, is_plain
from rayfin.deployments.guidance.fields import check_size
from rayfin.deployments.guidance.grammar import Grammar, form_text, make_grammar
from rayfin.deployments.guidance.grammar_check_process import STARVED, FrameBuffer, frame
from rayfin.deployments.guidance.schema.lint import MAX_BYTES
from rayfin.deployments.text.tokenizer import Tokenizer

MODULE = "rayfin.deployments.guidance.grammar_check_process"
MAX_WAITING = 64  # grammars of each kind, beyond those in the helper
MAX_CHILDREN = 2  # processes that compile
MAX_PLAIN = 4  # grammars on the way to the helper, which compiles them one after the other
MAX_ATTEMPTS = 3  # of a grammar whose helper dies; after the first it has a new process
MAX_FORMS = 128  # long ones whose grammars are kept
READ_BYTES = 2**16

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Read:
    """What a long form has become."""

    verdict: Verdict  # of its grammar
    grammar: Grammar | None = None
    refusal: tuple[str, str | None, str] | None = None  # of the form: message, param, code

    def check(self, param: str) -> Grammar:
        """Raises:
        InvalidRequest: the form is refused, or its grammar.
        """
        if self.refusal is not None:
            raise InvalidRequest(*self.refusal)
        self.verdict.check(param)
        assert self.grammar is not None
        return self.grammar


@dataclass(slots=True)
class _Check:
    """A grammar or a form that nothing is known of yet, and all who wait for its verdict."""

    number: int
    text: str
    digest: bytes
    plain: bool
    tenant: str
    result: "asyncio.Future[_Read]"
    param: str | None = None  # of a form: its path in the request
    attempts: int = 0
    waiters: int = 0  # requests; a check that has lost all of them is not begun

    def fail(self, error: RayfinError) -> None:
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # its clients may all have left


@dataclass(slots=True)
class CheckQueue:
    """Checks that wait, with turns by tenant. If it is full, the tenant with most gives way."""

    size: int = MAX_WAITING
    _by_tenant: dict[str, deque[_Check]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def append(self, check: _Check) -> _Check | None:
        """Returns the check that gives way: ``check`` itself, another one, or None."""
        dropped = None
        if len(self) >= self.size:
            heaviest = max(self._by_tenant, key=lambda tenant: len(self._by_tenant[tenant]))
            if len(self._by_tenant[heaviest]) <= len(self._by_tenant.get(check.tenant, ())) + 1:
                return check
            dropped = self._by_tenant[heaviest].pop()
        self._by_tenant.setdefault(check.tenant, deque()).append(check)
        return dropped

    def remove(self, check: _Check) -> bool:
        """Returns whether ``check`` was waiting here."""
        waiting = self._by_tenant.get(check.tenant)
        if waiting is None or check not in waiting:
            return False
        waiting.remove(check)
        if not waiting:
            del self._by_tenant[check.tenant]
        return True

    def put_back(self, check: _Check) -> None:
        """``check`` is the next one of its tenant."""
        self._by_tenant.setdefault(check.tenant, deque()).appendleft(check)

    def pop(self) -> _Check | None:
        """Returns the next check of the tenant whose turn it is."""
        for tenant in list(self._by_tenant):
            waiting = self._by_tenant.pop(tenant)
            if waiting:
                check = waiting.popleft()
                if waiting:
                    self._by_tenant[tenant] = waiting  # at the end of the row
                return check
        return None

    def drain(self) -> list[_Check]:
        """Returns all checks and empties the queue."""
        checks = [check for waiting in self._by_tenant.values() for check in waiting]
        self._by_tenant.clear()
        return checks


class ProcessChecker:
    """Checks grammars in a helper process; used in one event loop.

    Args:
        vocab_size: of the model's logits.
        max_bytes: of a form in a request; ``make_plan`` refuses a longer one.
        on_verdict: is called with each verdict that a request gets.
        on_restart: is called when a helper is replaced.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int = 0,
        *,
        max_bytes: int = MAX_BYTES,
        on_verdict: Callable[[str], None] = lambda kind: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_bytes = max_bytes
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._on_verdict = on_verdict
        self._on_restart = on_restart
        self.verdicts = VerdictCache()
        self._forms = DigestCache[_Read](MAX_FORMS)
        self._checks: dict[bytes, _Check] = {}  # unfinished ones, by digest
        self._number = 0
        self._queues = {True: CheckQueue(), False: CheckQueue()}  # by plain or not
        self._task: asyncio.Task[None] | None = None
        self._helper: _Helper | None = None  # that is ready

    @property
    def pid(self) -> int | None:
        """Of the helper; None until it is ready."""
        return None if self._helper is None else self._helper.process.pid

    def start(self) -> None:
        """Starts the helper if there is none; returns before it is ready."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_helper())

    async def check(self, texts: Iterable[str], param: str | None, tenant: str = "") -> bool:
        """As ``GrammarChecker.check``.

        Raises:
            EngineUnavailable: no helper can be started.
        """
        quick = True
        for text in texts:
            digest = self.verdicts.digest(text)
            verdict = self.verdicts.get(digest)
            if verdict is None:
                verdict = (await self._ask(text, digest, tenant)).verdict
            self._on_verdict(verdict.label)
            verdict.check(param)
            quick = quick and verdict.quick
        return quick

    async def form(self, outputs: StructuredOutputs, param: str, tenant: str = "") -> Grammar:
        """As ``GrammarChecker.form``.

        Raises:
            EngineUnavailable: no helper can be started.
        """
        check_size(outputs, param, self.max_bytes)
        try:
            text = form_text(outputs)
        except (TypeError, ValueError, RecursionError):  # no JSON, which is refused here
            return make_grammar(outputs, param, max_bytes=self.max_bytes)
        digest = self.verdicts.digest(f"{param}\n{text}")
        read = self._forms.get(digest)
        if read is None:
            read = await self._ask(text, digest, tenant, param)
        if read.refusal is None and read.verdict.kind != "ok":
            self._on_verdict(read.verdict.label)  # else ``check`` counts it
        return read.check(param)

    def close(self) -> None:
        """Kills the helper. Checks that wait fail."""
        if self._task is not None:
            self._task.cancel()
        if self._helper is not None:
            self._helper.kill()
        self._fail_all(EngineUnavailable("The server shuts down."))

    async def _ask(self, text: str, digest: bytes, tenant: str, param: str | None = None) -> _Read:
        """Returns what the helper finds out.

        Args:
            param: ``text`` is a form of this path in the request, no grammar.
        """
        check = self._checks.get(digest)
        if check is None:
            self._number += 1
            result = asyncio.get_running_loop().create_future()
            plain = param is None and is_plain(text)
            check = _Check(self._number, text, digest, plain, tenant, result, param)
            dropped = self._queues[check.plain].append(check)
            if dropped is not check:
                self._checks[digest] = check
            if dropped is not None:
                self._checks.pop(dropped.digest, None)
                dropped.fail(
                    Overloaded(
                        "Too many unknown grammars wait to be checked. Please retry later.",
                        retry_after=RETRY_AFTER_SECONDS,
                    )
                )
            self.start()
            self._send_waiting()
        check.waiters += 1
        try:
            return await asyncio.shield(check.result)
        finally:
            check.waiters -= 1
            # One that computes goes on: its verdict is kept, and its clients may come again.
            if not check.waiters and self._queues[check.plain].remove(check):
                del self._checks[check.digest]

    def _send_waiting(self) -> None:
        if self._helper is None:
            return
        for plain, limit in ((True, MAX_PLAIN), (False, MAX_CHILDREN)):
            while sum(check.plain is plain for check in self._helper.sent.values()) < limit:
                check = self._queues[plain].pop()
                if check is None:
                    break
                self._helper.send(check)

    async def _keep_helper(self) -> None:
        """Runs helpers, one after the other, until one does not start and nothing waits."""
        while True:
            helper = None
            try:
                helper = await _Helper.start(self._tokenizer, self._vocab_size, self.max_bytes)
                self._helper = helper
                self._send_waiting()
                await self._read(helper)
                logger.warning("The process that checks grammars has died; another one starts.")
            except Exception as error:
                logger.error("The process that checks grammars does not start: %r", error)
                self._fail_all(EngineUnavailable("Grammars cannot be checked now."))
                await asyncio.sleep(CHECKER_RESTART_PAUSE_SECONDS)
                if not self._checks:
                    return  # the next unknown grammar starts it
                continue
            finally:
                self._helper = None
                if helper is not None:
                    await asyncio.shield(helper.end())
            self._on_restart()
            self._put_back(list(helper.sent.values()))

    async def _read(self, helper: "_Helper") -> None:
        """Receives verdicts until the helper is gone."""
        while messages := await helper.receive():
            for message in messages:
                check = helper.sent.pop(message.get("id", 0), None)
                if check is None:
                    continue
                self._checks.pop(check.digest, None)
                if message["kind"] == STARVED:
                    check.fail(Overloaded("The server is too busy to check this grammar."))
                    continue
                read = self._know(check, message)
                if not check.result.done():
                    check.result.set_result(read)
            self._send_waiting()

    def _know(self, check: _Check, message: dict[str, Any]) -> _Read:
        """Keeps what was found out."""
        verdict = Verdict(message["kind"], message["reason"], message.get("quick", False))
        if check.param is None:
            self.verdicts.put(check.digest, verdict)
            return _Read(verdict)
        grammar, refusal = message.get("grammar"), message.get("refusal")
        read = _Read(
            verdict,
            None if grammar is None else Grammar(grammar[0], grammar[1], tuple(grammar[2])),
            None if refusal is None else (refusal[0], refusal[1], refusal[2]),
        )
        self._forms.put(check.digest, read)
        if read.grammar is not None:
            self.verdicts.put(self.verdicts.digest(read.grammar.text), verdict)
        return read

    def _put_back(self, checks: list[_Check]) -> None:
        """Has what died with a helper checked again, each in a new process."""
        for check in reversed(checks):
            check.attempts += 1
            check.plain = False
            if not check.waiters:
                self._checks.pop(check.digest, None)
            elif check.attempts < MAX_ATTEMPTS:
                self._queues[False].put_back(check)
            else:
                self._checks.pop(check.digest, None)
                check.fail(EngineUnavailable("Grammars cannot be checked now."))

    def _fail_all(self, error: RayfinError) -> None:
        for check in self._checks.values():
            check.fail(error)
        self._checks.clear()
        for queue in self._queues.values():
            queue.drain()


class _Helper:
    """One process, and the socket to it."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self.sent: dict[int, _Check] = {}  # by number
        self._reader = reader
        self._writer = writer
        self._frames = FrameBuffer()
        self._silence: asyncio.Handle | None = None

    @classmethod
    async def start(cls, tokenizer: Tokenizer, vocab_size: int, max_bytes: int) -> "_Helper":
        """Returns a helper that is ready.

        Raises:
            Exception: it cannot start.
        """
        setup = await asyncio.to_thread(_setup, tokenizer, vocab_size, max_bytes)
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # in the loop's thread: the kernel ends it with that
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        helper = cls(process, reader, writer)
        try:
            async with asyncio.timeout(CHECKER_START_SECONDS):
                writer.write(setup)
                if not await helper.receive():
                    raise EOFError("it has ended")
        except BaseException:
            await asyncio.shield(helper.end())
            raise
        return helper

    def send(self, check: _Check) -> None:
        self.sent[check.number] = check
        task = {"id": check.number, "text": check.text, "plain": check.plain, "form": check.param}
        self._writer.write(frame({**task, "fresh": check.attempts > 0}))
        self._expect()

    async def receive(self) -> list[dict[str, Any]]:
        """Returns the next messages, or none if the helper is gone."""
        while True:
            try:
                data = await self._reader.read(READ_BYTES)
            except ConnectionError:
                return []
            if not data:
                return []
            if self._silence is not None:
                self._expect()
            if messages := list(self._frames.push(data)):
                return messages

    def _expect(self) -> None:
        """Kills the helper if it says nothing for a while, though it has work."""
        if self._silence is not None:
            self._silence.cancel()
        loop = asyncio.get_running_loop()
        self._silence = loop.call_later(CHECKER_SILENT_SECONDS, self._judge_silence)

    def _judge_silence(self) -> None:
        """Hears first what has come while the event loop stood still."""
        self._silence = asyncio.get_running_loop().call_soon(self._kill_at_work)

    def _kill_at_work(self) -> None:
        self._silence = None
        if self.sent:
            self.kill()

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def end(self) -> None:
        """Kills the process and waits until it is gone."""
        self.kill()
        if self._silence is not None:
            self._silence.cancel()
        self._writer.close()
        await asyncio.to_thread(self.process.wait)


def _setup(tokenizer: Tokenizer, vocab_size: int, max_bytes: int) -> bytes:
    """The first message to a helper."""
    return frame(
        {
            "tokenizer": tokenizer.backend.to_str(),
            "vocab_size": vocab_size,
            "ends": sorted(tokenizer.eos_token_ids),
            "bos": tokenizer.inner.bos_token_id,
            "special_tokens": tokenizer.added_ids,
            "max_bytes": max_bytes,
        }
    )

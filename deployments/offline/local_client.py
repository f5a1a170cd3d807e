"""An engine in this process that many coroutines use at once: a thread steps it."""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, RayfinError
from rayfin.actors.messages import (
    Command,
    Ended,
    EngineInfo,
    EngineRequest,
    TokenDelta,
    TokenDeltas,
    TokenLog,
)
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.actors.parts import RequestPart
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.inbox import EngineCall
from rayfin.actors.timing import LOBBY_TICK_SECONDS
from rayfin.deployments.client.deltas import WholeDeltas, split_deltas
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.offline.engines import load_engine
from rayfin.deployments.offline.weights import InlineWeights, LocalWeights

if TYPE_CHECKING:
    from rayfin.actors.runner.inline import InlineExecutor

CLIENT = ""
NAME = "inline"


class LocalClient:
    """The ``EngineClient`` of an engine in this process; made in the event loop that uses it."""

    def __init__(
        self, engine: Engine, info: EngineInfo, executor: "InlineExecutor", args: EngineArgs
    ) -> None:
        self._engine = engine
        self._info = info
        self._executor = executor
        self._inbox: queue.SimpleQueue[EngineCall | None] = queue.SimpleQueue()
        self._streams: dict[int, asyncio.Queue[TokenDelta | RayfinError]] = {}
        self._names: dict[int, str] = {}  # request ids, by key, of those read in parts
        self._whole = WholeDeltas({})  # of those read at their end
        self._weights = ""  # that made the last tokens
        self._failure: str | None = None
        self._versions = LocalWeights(args, executor)
        self.weights = InlineWeights(self._versions, self._call)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    async def load(cls, args: EngineArgs) -> "LocalClient":
        """Loads the model.

        Raises:
            InvalidConfig: it cannot be served in this process.
        """
        return cls(*await asyncio.to_thread(load_engine, args), args)

    def close(self) -> None:
        """Ends the engine, and all streams with an error."""
        self._failure = self._failure or "the engine was closed"
        self._inbox.put(None)
        self._thread.join()
        for deltas in self._streams.values():
            deltas.put_nowait(EngineUnavailable(self._failure))
        self._versions.close()

    async def info(self) -> EngineInfo:
        return self._info

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        await self.check_health()
        deltas: asyncio.Queue[TokenDelta | RayfinError] = asyncio.Queue()
        self._streams[request.key] = deltas
        if request.whole:
            self._whole.add(request.key, request.request_id)
        else:
            self._names[request.key] = request.request_id
        self._inbox.put(EngineCall(lambda engine: self._add(engine, request)))
        finished = False
        try:
            while not finished:
                item = await deltas.get()
                finished = isinstance(item, RayfinError) or item.finish_reason is not None
                if isinstance(item, RayfinError):
                    raise item
                yield item
        except asyncio.CancelledError:
            # An aborted request has the tokens so far.
            gathered = self._whole.drop(request.key)
            if gathered is not None and gathered.tokens:
                gathered.weights = self._weights
                yield gathered
            raise
        finally:
            del self._streams[request.key]
            self._names.pop(request.key, None)
            self._whole.drop(request.key)
            if not finished:
                reason = "stop" if request.satisfied else "abort"
                key = request.key
                self._inbox.put(EngineCall(lambda engine: engine.abort(CLIENT, key, reason)))

    async def recall(self, tenant: str, request_ids: Sequence[str]) -> list[TokenLog | None]:
        return [None] * len(request_ids)

    async def check_health(self) -> None:
        if self._failure is not None:
            raise EngineUnavailable(self._failure)

    async def snapshots(self) -> list[EngineSnapshot]:
        return [await self._call(lambda engine: engine.snapshot(NAME))]

    async def engines(self) -> list[EngineReport]:
        stats = None if self._failure is not None else self._engine.stats()
        return [EngineReport.of("0", NAME, stats)]

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]:
        await self._call(lambda engine: engine.carry_out(command))
        return await self.engines()

    async def prepare(self, part: RequestPart) -> None:
        part.check(self._engine.config.parts)
        prepared = await self._call(lambda engine: self._executor.prepare(part.needs))
        if (error := prepared.error()) is not None:
            raise error

    def latency(self) -> dict[str, tuple[float, int]]:
        return {}

    async def metrics(self) -> bytes:
        return b""

    async def _call(self, ask: Callable[[Engine], Any]) -> Any:
        await self.check_health()
        call = EngineCall(ask)
        self._inbox.put(call)
        return await asyncio.wrap_future(call.answer)

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        """Of the engine's thread."""
        error: RayfinError
        try:
            if self._failure is not None:
                raise EngineUnavailable(self._failure)
            engine.add(request)
            return
        except RayfinError as refusal:
            error = refusal
        self._post(TokenDeltas.only(Ended(request.key, "error", error=error)))

    def _run(self) -> None:
        engine = self._engine
        while self._process_inbox(engine):
            try:
                for message in engine.step().values():
                    self._post(message)
            except Exception as error:  # of the model: there is no other process to go on with
                self._failure = f"the engine failed: {type(error).__name__}: {error}"
                for message in engine.fail_all(EngineUnavailable(self._failure)).values():
                    self._post(message)

    def _process_inbox(self, engine: Engine) -> bool:
        """Carries out all calls; waits for one if there is no step to run. False at the end."""
        try:
            block = not engine.has_steps or self._failure is not None
            while True:
                patience = LOBBY_TICK_SECONDS if engine.has_work else None
                call = self._inbox.get(block, patience)
                if call is None:
                    return False
                call.reply(engine)
                block = False
        except queue.Empty:
            return True

    def _post(self, message: TokenDeltas) -> None:
        self._loop.call_soon_threadsafe(self._deliver, message)

    def _read_in_parts(self, keys: set[int]) -> None:
        """Delivers what is gathered of requests, as their next tokens are of other weights."""
        for key in keys:
            if (delta := self._whole.drop(key)) is not None:
                delta.weights = self._weights
                self._names[key] = delta.request_id
                self._streams[key].put_nowait(delta)

    def _deliver(self, message: TokenDeltas) -> None:
        for ended in message.ended:
            if ended.error is not None and ended.key in self._streams:
                self._streams[ended.key].put_nowait(ended.error)
        if len(message.keys) and (message.weights != self._weights or message.kept):
            self._read_in_parts({*self._whole.begun(), *message.kept})
            self._weights = message.weights
        parts = split_deltas(message, self._names)
        for key, delta in itertools.chain(parts, self._whole.push(message)):
            self._streams[key].put_nowait(delta)

"""The engines of an application behind one ``EngineClient``: streams outlive the engines."""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rayfin.actors.errors import (
    EngineAsleep,
    EngineLost,
    EngineUnavailable,
    NotFound,
    Overloaded,
    RequestHandedBack,
)
from rayfin.actors.messages import (
    Command,
    EngineInfo,
    EngineRequest,
    EngineSnapshot,
    EngineStats,
    TokenDelta,
    TokenLog,
)
from rayfin.actors.supervision.supervisor import check_progress
from rayfin.actors.timing import (
    APPLICATION_END_SECONDS,
    REGISTRY_REFRESH_SECONDS,
    REGISTRY_SEARCH_SECONDS,
    REPLAY_PAUSE_SECONDS,
)
from rayfin.deployments.client.connection import EngineConnection, News
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.client.replay import Replay
from rayfin.deployments.client.request_overhead import RequestOverheadTimer
from rayfin.deployments.client.routing import PrefixAware, Router
from rayfin.deployments.client.waiting_room import WaitingRoom

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long requests wait for an engine while there is none, in seconds."""

    newcomer: float = 25.0  # one that no engine has had yet
    stream: float = 120.0  # one that has lost its engine


class EnginePool:
    """One process' connections to the engines of an application.

    ``find`` returns the schedulers' handles by name; it is asked again and again, in a thread. A
    request goes to the engine that ``router`` picks, or waits in ``room`` for one. When that is
    lost, the request goes on at the next one as prompt + tokens so far: whoever reads its stream
    sees a pause and nothing else. Engines that are not of ``identity`` get no request: while a new
    version with another model takes over, engines of both are there. Nobody waits for an engine any
    more when ``is_over`` says that none will come; it is asked in a thread while there is none.
    """

    def __init__(
        self,
        client: str,
        find: Callable[[], Mapping[str, Any]],
        router: Router | None = None,
        patience: Patience | None = None,
        room: WaitingRoom | None = None,
        identity: str | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._identity = identity
        self._clients = (f"{client}.{number}" for number in itertools.count())
        self._find = find
        self._router: Router = PrefixAware() if router is None else router
        self._patience = Patience() if patience is None else patience
        self._room = WaitingRoom() if room is None else room
        self._is_over = is_over
        self._over = False
        self._in_vain = False  # a request has waited for its time, and there is still no engine
        self._links: dict[str, EngineConnection] = {}
        self._labels: dict[str, str] = {}  # in metrics, by engine
        self._limits: EngineInfo | None = None
        self._homes: dict[int, EngineConnection] = {}  # of elders that run: siblings go there too
        self._any_ready = asyncio.Event()
        self.on_replay: Callable[[str], None] = lambda reason: None  # of REPLAY_REASONS
        self.on_transit: Callable[[float], None] = lambda seconds: None
        self.on_limits: Callable[[EngineInfo], None] = lambda limits: None  # what `info` says now
        self._watching = [
            asyncio.create_task(work) for work in (self._refresh(), self._watch_for_the_end())
        ]

    async def info(self) -> EngineInfo:
        """Limits that hold at every engine; waits a little for the first one to be ready.

        Raises:
            EngineUnavailable: there has been none.
        """
        if self._limits is None:
            with self._room.waiting():
                await self._until_ready(self._patience.newcomer)
        if self._limits is None:
            raise EngineUnavailable("no engine is ready")
        return self._limits

    async def stats(self) -> dict[str, EngineStats]:
        """The counters of the engines that are connected, by a short name that metrics can bear."""
        links = [link for link in self._links.values() if link.connected]
        stats = await asyncio.gather(*(link.fresh_stats() for link in links))
        return {self._label(link.name): own for link, own in zip(links, stats, strict=True)}

    async def check_health(self) -> None:
        """See ``EngineClient.check_health``; never waits for an engine.

        Where engines are started on demand, that there is none is no fault.
        """
        reason = EngineUnavailable("no engine is ready")
        for link in self._links.values():
            if not link.connected:
                continue
            try:
                check_progress(link.stats)
                return
            except EngineUnavailable as error:
                reason = error
        connected = any(link.connected for link in self._links.values())
        if connected or self._in_vain or not self._room.starts_engines:
            raise reason

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """See ``EngineClient.stream``."""
        replay = Replay(request, _now())
        failures = 0  # in a row
        refused: set[str] = set()  # engines whose queues are full
        link: EngineConnection | None = None
        key = request.key
        try:
            while True:
                link = await self._place(request, replay, refused)
                attempt = replay.attempt(_now())
                key = attempt.key
                self._homes[request.key] = link
                news, overhead = link.open(attempt), RequestOverheadTimer(_now())
                try:
                    while True:
                        delta = await _next(news)
                        delta = replay.accept(delta, now := _now())
                        if (seconds := overhead.observe(delta, now)) is not None:
                            self.on_transit(seconds)
                        failures = 0
                        refused.clear()
                        yield delta
                        if delta.finish_reason is not None:
                            return
                except EngineUnavailable as error:
                    replay.lost(_now())
                    self._note_loss(request, replay, error)
                except Overloaded:
                    refused.add(link.name)
                    if self._ready(refused):
                        continue
                    if replay.attempts == len(refused):  # it is new: the queue limits are for it
                        raise
                    refused.clear()
                    failures += 1
                    await self._pause(replay, failures)
        finally:
            self._homes.pop(request.key, None)
            if link is not None:
                link.drop(key, stopped=request.satisfied)

    async def recall(self, tenant: str, request_ids: Sequence[str]) -> list[TokenLog | None]:
        """See ``EngineClient.recall``; of engines that know a request, the one that has most."""
        known = await asyncio.gather(
            *(link.recall(tenant, request_ids) for link in self._links.values())
        )
        if not known:
            return [None] * len(request_ids)
        return [
            max(filter(None, logs), key=lambda log: len(log.tokens), default=None)
            for logs in zip(*known, strict=True)
        ]

    async def snapshots(self) -> list[EngineSnapshot]:
        """See ``EngineClient.snapshots``; in the order of the engines' names."""
        links = [self._links[name] for name in sorted(self._links)]
        taken = await asyncio.gather(*(link.snapshot() for link in links))
        return [snapshot for snapshot in taken if snapshot is not None]

    async def engines(self) -> list[EngineReport]:
        """See ``EngineClient.engines``; in the order of their labels."""
        return await self._report(self._own)

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]:
        """See ``EngineClient.manage``."""
        links = [own for own in self._own if engine in (None, self._label(own.name))]
        if engine is not None and not links:
            raise NotFound(f"There is no engine {engine[:64]!r}.", "engine")
        await asyncio.gather(*(link.manage(command) for link in links))
        return await self._report(links)

    async def _report(self, links: Iterable[EngineConnection]) -> list[EngineReport]:
        labelled = sorted((self._label(link.name), link) for link in links)
        taken = await asyncio.gather(*(link.fresh_stats() for _, link in labelled))
        return [
            EngineReport.of(label, link.name, stats if link.connected else None)
            for (label, link), stats in zip(labelled, taken, strict=True)
        ]

    def close(self) -> None:
        """See ``EngineClient.close``."""
        for work in self._watching:
            work.cancel()
        for link in self._links.values():
            link.close()

    @property
    def _own(self) -> list[EngineConnection]:
        """Those of this application's version, connected or not."""
        return [link for link in self._links.values() if not link.foreign]

    @property
    def _all_asleep(self) -> bool:
        return bool(self._own) and all(link.asleep for link in self._own)

    def _ready(self, refused: Iterable[str] = ()) -> list[EngineConnection]:
        return [link for link in self._links.values() if link.ready and link.name not in refused]

    async def _place(
        self, request: EngineRequest, replay: Replay, refused: Iterable[str]
    ) -> EngineConnection:
        """The engine to run the request; waits until there is one.

        Raises:
            EngineAsleep: an operator has put them all to sleep.
            Overloaded: too many wait.
            EngineUnavailable: there was none for too long, or none will come.
            DeadlineExceeded: for longer than the request has time.
        """
        waited = False
        while not (ready := self._ready(refused) or self._ready()):
            if self._over:
                raise EngineUnavailable("the server is being stopped")
            if self._all_asleep and not replay.begun:  # a stream waits
                raise EngineAsleep("every engine sleeps, until an operator wakes it")
            seconds, tokens = self._seconds_left(replay), len(request.prompt)
            if not waited and not replay.attempts:
                self._room.check(tokens)
            waited = True
            with self._room.waiting(tokens):
                await self._until_ready(seconds)
        home = self._homes.get(request.parent_key) if request.parent_key is not None else None
        if home in ready:
            return home
        picked = self._router.pick(request, [link.candidate() for link in ready])
        return self._links[picked.name]

    def _note_loss(self, request: EngineRequest, replay: Replay, error: EngineUnavailable) -> None:
        """The engine has not finished the request, and that was no fault of the request's."""
        moved = isinstance(error, RequestHandedBack)
        if not moved and (not isinstance(error, EngineLost) or error.crashed):
            replay.died()
        self.on_replay("moved" if moved else "lost")
        logger.info("request %s is sent again: %s", request.request_id, error)

    async def _pause(self, replay: Replay, failures: int) -> None:
        """Before a queue that was full is asked again."""
        first, longest = REPLAY_PAUSE_SECONDS
        seconds = min(longest, first * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
        await asyncio.sleep(min(seconds, self._seconds_left(replay)))

    def _seconds_left(self, replay: Replay) -> float:
        """How long the request may wait for an engine.

        Raises:
            EngineUnavailable: no longer.
            DeadlineExceeded: no longer, by its own deadline.
        """
        now = _now()
        patience = self._patience.stream if replay.attempts else self._patience.newcomer
        left = replay.waiting_since + patience - now
        own = replay.left(now)
        if left <= 0:
            self._in_vain = True
            raise EngineUnavailable(f"no engine has taken the request for {patience:g} s")
        return left if own is None else min(left, own)

    async def _until_ready(self, seconds: float) -> None:
        """Returns when an engine is ready, or after so many seconds."""
        if not self._ready():
            self._any_ready.clear()  # it is also set where all sleep: the next change is waited for
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for may lose a cancellation (3.11)
                await self._any_ready.wait()

    async def _refresh(self) -> None:
        while True:
            try:
                found = await asyncio.to_thread(self._find)
            except Exception as error:  # Ray's own, whatever it is: the registry is away
                logger.warning("cannot look for engines: %s", error)
            else:
                self._update_links(found)
            searching = not self._any_ready.is_set() and not self._room.is_quiet
            await asyncio.sleep(REGISTRY_SEARCH_SECONDS if searching else REGISTRY_REFRESH_SECONDS)

    async def _watch_for_the_end(self) -> None:
        """A task of its own: nobody may answer for long, and engines are looked for meanwhile."""
        while True:
            await asyncio.sleep(APPLICATION_END_SECONDS)
            if self._links or self._room.is_quiet:
                self._over = False
                continue
            try:
                self._over = await asyncio.to_thread(self._is_over)
            except Exception as error:  # Ray's or Serve's own, whatever it is
                logger.warning("nobody knows whether an engine will come: %s", error)
            self._changed()

    def _update_links(self, found: Mapping[str, Any]) -> None:
        for name, link in list(self._links.items()):
            gone = name not in found and not link.connected
            if gone or (name in found and link.scheduler != found[name]):
                del self._links[name]
                link.close()
        for name, scheduler in found.items():
            if name not in self._links:
                self._links[name] = EngineConnection(
                    self._clients, name, scheduler, self._changed, self._identity
                )
        self._changed()

    def _changed(self) -> None:
        """A link is ready now, or no longer is."""
        ready = self._ready()
        infos = [link.info for link in ready if link.info is not None]
        if infos:
            self._in_vain = False
            self._limits = replace(
                infos[0],
                max_model_len=min(info.max_model_len for info in infos),
                num_pages=min(info.num_pages for info in infos),
            )
            self.on_limits(self._limits)
        if infos or self._all_asleep or self._over:  # nobody need wait, for an engine or in vain
            self._any_ready.set()
        else:
            self._any_ready.clear()

    def _label(self, name: str) -> str:
        """The end of the engine's name if that is a number, else the first number not taken."""
        if name not in self._labels:
            self._labels = {own: n for own, n in self._labels.items() if own in self._links}
            last = name.rpartition("/")[2]
            taken = set(self._labels.values())
            free = next(str(n) for n in range(len(taken) + 1) if str(n) not in taken)
            self._labels[name] = last if last.isdecimal() else free
        return self._labels[name]


async def _next(news: News) -> TokenDelta:
    item = await news.get()
    if isinstance(item, Exception):
        raise item
    return item


def _now() -> float:
    return asyncio.get_running_loop().time()

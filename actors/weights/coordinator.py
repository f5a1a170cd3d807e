"""One update of weights at a time, for all engines of a deployment: all serve it, or none does.

    STAGING   every engine says whether it can serve the version; one no ends the update
    PAUSING   engines stop between two steps, until all have
    DECIDED   each makes it CURRENT and computes by it, until all have: this is never undone
    RESUMING  engines go on

A coordinator that begins asks all engines. If one has a version, all have voted for it, and all get
it; else nothing was decided, and engines go on with what they have.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rayfin.actors import failpoints
from rayfin.actors.errors import EngineBusy, EngineUnavailable, RayfinError
from rayfin.actors.timing import (
    DRAIN_POLL_SECONDS,
    WEIGHTS_ALIVE_SECONDS,
    WEIGHTS_LEAVE_SECONDS,
    WEIGHTS_PAUSE_SECONDS,
    WEIGHTS_POLL_SECONDS,
    WEIGHTS_SILENT_SECONDS,
)
from rayfin.actors.weights.version import (
    EngineOrder,
    EngineWeights,
    KeptPages,
    NewRequests,
    PauseMode,
    Vote,
    WeightOrder,
    WeightVersion,
)

logger = logging.getLogger(__name__)


class EnginePort(Protocol):
    """One engine, as a coordinator reaches it. Each call raises EngineUnavailable without it."""

    async def stage(self, version: WeightVersion, chunks: Sequence[Any]) -> Vote:
        """Asks whether it can serve a version; RayfinError says why not."""
        ...

    async def order(self, order: WeightOrder) -> EngineWeights:
        """Has it carry out an order."""
        ...


Find = Callable[[], Awaitable[Mapping[str, EnginePort]]]
"""Finds the engines that there are, by name."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update has come to."""

    version: WeightVersion
    engines: int
    in_place: bool
    kept: Sequence[str]
    seconds: float
    pause_seconds: float

    def as_json(self) -> dict[str, Any]:
        """As a caller of an update gets it."""
        return {
            "serial": self.version.serial,
            "version": self.version.label,
            "digest": self.version.digest,
            "engines": self.engines,
            "how": "in place" if self.in_place else "restart",
            "kept": list(self.kept),
            "seconds": round(self.seconds, 3),
            "pause_seconds": round(self.pause_seconds, 3),
        }


class WeightCoordinator:
    """Updates and pauses of one deployment; one event loop calls it."""

    def __init__(
        self,
        find: Find,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._find, self._clock, self._sleep = find, clock, sleep
        self.decided = WeightVersion()
        self.updates = {"done": 0, "refused": 0, "failed": 0}
        self._busy: tuple[str, float] | None = None  # the update amid, and since when
        self._paused_until: float | None = None  # of a pause by hand
        self._votes: dict[str, Vote] = {}  # of the update amid
        self._undecided: asyncio.Task[Any] | None = None  # the update amid, until it is decided

    async def recover(self) -> None:
        """Ends what another coordinator has left undone."""
        self._begin("a recovery")
        try:
            await self._recover()
        finally:
            self._busy = None

    async def _recover(self) -> None:
        states = await self._each(WeightOrder("state"))
        top = max(states.values(), key=lambda state: state.version.serial, default=None)
        if top is None:
            return
        self.decided = top.version
        serials = {state.version.serial for state in states.values()}
        if len(serials) > 1:
            logger.warning("weights %r are completed", top.version.label)
            await self._each(WeightOrder("commit", version=top.version), decided=True)
        elif any(state.proposed is not None for state in states.values()):
            await self._each(WeightOrder("drop"))
        if any(state.pausing or state.leaving for state in states.values()):
            await self._each(WeightOrder("resume"))

    async def update(
        self,
        version: WeightVersion,
        chunks: Sequence[Any] = (),
        *,
        mode: PauseMode = "keep",
        pages: KeptPages = "recompute",
        new: NewRequests = "wait",
        order: EngineOrder = "together",
        timeout: float | None = None,
    ) -> UpdateReport:
        """Makes all engines serve a version, whose file they can read or get by ``chunks``.

        Args:
            timeout: seconds after which it is abandoned unless it is decided.

        Raises:
            EngineBusy: another update is amid, or this one was abandoned.
            EngineUnavailable: there is no engine.
            RayfinError: an engine cannot serve it; nothing has changed.
        """
        began = self._begin(f"update {version.label!r}")
        self._undecided = task = asyncio.current_task()
        timer = timeout and asyncio.get_running_loop().call_later(timeout, self.abandon)
        try:
            states = await self._each(WeightOrder("state"))
            if not states:
                raise EngineUnavailable("no engine is ready")
            versions = [state.version for state in states.values()]
            current = max(versions, key=lambda version: version.serial)
            same = current.digest == version.digest and version.label in ("", current.label)
            if same and all(state.version.serial == current.serial for state in states.values()):
                return UpdateReport(current, len(states), True, (), self._clock() - began, 0.0)
            serial = max(current.serial, self.decided.serial) + 1
            version = replace(version, serial=serial, label=version.label or str(serial))
            await self._stage(version, chunks, states)
            if order == "in_turn" and self._paused_until is None:
                return await self._in_turn(version, mode, pages, new, began)
            return await self._carry_out(version, mode, pages, new, began)
        except RayfinError as error:
            self.updates["refused" if error.status < 500 else "failed"] += 1
            raise
        except asyncio.CancelledError:
            if self._undecided is task:
                raise
            self.updates["refused"] += 1
            raise EngineBusy("the update was abandoned, or took too long", "weights") from None
        finally:
            if timer:
                timer.cancel()
            self._busy = self._undecided = None

    def abandon(self) -> None:
        """Ends the update that is amid, if it is not decided: engines go on as they are."""
        task, self._undecided = self._undecided, None
        if task is not None:
            task.cancel()

    async def _carry_out(
        self,
        version: WeightVersion,
        mode: PauseMode,
        pages: KeptPages,
        new: NewRequests,
        began: float,
    ) -> UpdateReport:
        by_hand = self._paused_until is not None
        paused = self._clock()
        try:
            if not by_hand:
                await self._pause(mode, new)
            if failpoints.ACTIVE:
                failpoints.ACTIVE.hit("weights.decide")
        except BaseException:
            await asyncio.shield(self._give_up())
            raise
        # From here on it is decided: whatever dies, all engines get it.
        self._undecided = None
        done = asyncio.ensure_future(self._complete(version, pages, resume=not by_hand))
        await asyncio.shield(done)
        return self._report(version, began, self._clock() - paused)

    def _report(self, version: WeightVersion, began: float, paused: float) -> UpdateReport:
        now, votes = self._clock(), list(self._votes.values())
        self.updates["done"] += 1
        in_place, kept = all(vote.in_place for vote in votes), votes[0].kept
        return UpdateReport(version, len(votes), in_place, kept, now - began, paused)

    async def _in_turn(
        self,
        version: WeightVersion,
        mode: PauseMode,
        pages: KeptPages,
        new: NewRequests,
        began: float,
    ) -> UpdateReport:
        """Changes one engine after the other, while the others serve; in mode "keep" they get its
        requests.

        It is decided: all have voted. The longest pause is in the report.
        """
        self._undecided, self.decided = None, version
        commit = WeightOrder("commit", version=version, pages=pages)
        longest = 0.0

        async def change() -> None:
            nonlocal longest
            for name in sorted(self._votes):
                only = {name: None}
                if mode == "keep" and len(self._votes) > 1:
                    await self._leave(only)
                paused = self._clock()
                await self._pause(mode, new, only)
                await self._each(commit, only, decided=True, alone=True)
                await self._each(WeightOrder("resume"), only, decided=True, alone=True)
                longest = max(longest, self._clock() - paused)

        await asyncio.shield(asyncio.ensure_future(change()))
        return self._report(version, began, longest)

    async def _leave(self, only: Mapping[str, object]) -> None:
        """Lets clients move the requests of an engine with their pages; hands back what is left."""
        deadline = self._clock() + WEIGHTS_LEAVE_SECONDS
        order = WeightOrder("leave")
        while True:
            states = await self._each(order, only, decided=True, alone=True)
            if not any(state.leaving and state.requests for state in states.values()):
                return
            if self._clock() >= deadline:
                break
            order = WeightOrder("state")
            await self._sleep(DRAIN_POLL_SECONDS)
        await self._each(WeightOrder("hand_back"), only, decided=True, alone=True)

    async def _stage(
        self, version: WeightVersion, chunks: Sequence[Any], engines: Mapping[str, object]
    ) -> None:
        """Asks every engine; those that die amid it are asked again when they are back."""

        async def stage(port: EnginePort) -> Vote:
            return await port.stage(version, chunks)

        try:
            self._votes = await self._all(stage, engines)
            if not self._votes:
                raise EngineUnavailable("no engine is ready")
        except BaseException:
            await asyncio.shield(self._give_up())
            raise

    async def _give_up(self) -> None:
        """Nothing was decided: engines go on as they are."""
        await self._each(WeightOrder("drop"), decided=True)
        if self._paused_until is None:
            await self._each(WeightOrder("resume"), decided=True)

    async def _pause(
        self, mode: PauseMode, new: NewRequests, only: Mapping[str, object] | None = None
    ) -> None:
        required, alone = self._votes if only is None else only, only is not None
        pause = WeightOrder("pause", mode=mode, new=new)
        states = await self._each(pause, required, alone=alone)
        while not all(state.paused for state in states.values()):
            await self._sleep(WEIGHTS_POLL_SECONDS)
            states = await self._each(WeightOrder("state"), required, alone=alone)
            if any(not state.pausing for state in states.values()):  # one is new
                states = await self._each(pause, required if alone else None, alone=alone)

    async def _complete(self, version: WeightVersion, pages: KeptPages, *, resume: bool) -> None:
        self.decided = version
        commit = WeightOrder("commit", version=version, pages=pages)
        await self._each(commit, self._votes, decided=True)
        if resume:
            await self._each(WeightOrder("resume"), self._votes, decided=True)

    async def pause(
        self, mode: PauseMode, new: NewRequests, seconds: float = WEIGHTS_PAUSE_SECONDS
    ) -> None:
        """Pauses all engines until ``resume``, or for so many seconds; returns when all are.

        Raises:
            EngineBusy: an update is amid.
        """
        self._begin("a pause")
        self._votes = {}
        try:
            await self._pause(mode, new)
            self._paused_until = self._clock() + seconds
        finally:
            self._busy = None

    async def resume(self) -> None:
        """Ends a pause by hand.

        Raises:
            EngineBusy: an update is amid.
        """
        self._begin("a resume")
        try:
            self._paused_until = None
            await self._each(WeightOrder("resume"))
        finally:
            self._busy = None

    async def states(self) -> dict[str, EngineWeights]:
        """What each engine says, by its name."""
        return await self._each(WeightOrder("state"))

    async def watch(self) -> None:
        """Lets engines hear of this coordinator; ends a pause in time, and what is left undone."""
        while True:
            await self._sleep(WEIGHTS_ALIVE_SECONDS)
            until = self._paused_until
            try:
                if until is not None and self._clock() > until:
                    logger.warning("a pause has taken its time: engines are resumed")
                    await self.resume()
                else:
                    await self._tend()
            except RayfinError as error:
                logger.warning("engines are not asked: %s", error)

    async def _tend(self) -> None:
        """Gives engines that were left out of an update, or began amid it, what was decided."""
        states = await self._each(WeightOrder("state"), patience=0.0)
        if self._busy is not None:
            return
        versions = [self.decided, *(state.version for state in states.values())]
        self.decided = max(versions, key=lambda version: version.serial)
        behind = [
            name for name, state in states.items() if state.version.serial < self.decided.serial
        ]
        held = any(state.pausing or state.leaving for state in states.values())
        paused = held and self._paused_until is None
        if not behind and not paused:
            return
        self._begin("what was left undone")
        try:
            if behind:
                logger.warning("%s get weights %r", ", ".join(behind), self.decided.label)
                commit = WeightOrder("commit", version=self.decided)
                await self._each(commit, decided=True, patience=0.0)
            if self._paused_until is None:
                await self._each(WeightOrder("resume"), decided=True, patience=0.0)
        finally:
            self._busy = None

    def _begin(self, what: str) -> float:
        now = self._clock()
        if self._busy is not None:
            other, since = self._busy
            raise EngineBusy(f"{other} is amid, for {now - since:.1f} s", "weights")
        self._busy = what, now
        return now

    async def _each(
        self,
        order: WeightOrder,
        required: Mapping[str, object] | None = None,
        *,
        decided: bool = False,
        alone: bool = False,
        patience: float = WEIGHTS_SILENT_SECONDS,
    ) -> dict[str, EngineWeights]:
        async def call(port: EnginePort) -> EngineWeights:
            return await port.order(order)

        return await self._all(call, required, decided=decided, alone=alone, patience=patience)

    async def _all(
        self,
        call: Callable[[EnginePort], Awaitable[Any]],
        required: Mapping[str, object] | None = None,
        *,
        decided: bool = False,
        alone: bool = False,
        patience: float = WEIGHTS_SILENT_SECONDS,
    ) -> dict[str, Any]:
        """The answers of all engines, by name.

        One that cannot be reached, or has gone amid this, is asked again, then left out.

        Args:
            required: engines that are waited for though they are not there now; others are not,
                for one that begins asks what is decided.
            decided: an engine that fails is asked again, as one that cannot be reached.
            alone: no engine but the required ones is asked.
            patience: seconds in which engines are asked again.

        Raises:
            RayfinError: the first one that an engine has raised.
        """
        answers, known = dict[str, Any](), set(required or ())
        deadline = self._clock() + patience
        while True:
            engines, looked = dict[str, EnginePort](), False
            try:
                engines, looked = dict(await self._find()), True
            except EngineUnavailable as error:
                logger.warning("engines are not found: %s", error)
            if not required:
                known |= engines.keys()
            asked = [
                name for name in engines if name not in answers and (not alone or name in known)
            ]
            calls = (call(engines[name]) for name in asked)
            for name, answer in zip(
                asked, await asyncio.gather(*calls, return_exceptions=True), strict=True
            ):
                fails = isinstance(answer, EngineUnavailable)
                if fails or (decided and isinstance(answer, Exception)):
                    level = logging.WARNING if decided or patience else logging.DEBUG
                    logger.log(level, "engine %s is asked again: %s", name, answer)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    answers[name] = answer
            if (looked and answers.keys() >= known) or self._clock() >= deadline:
                return answers
            await self._sleep(10 * WEIGHTS_POLL_SECONDS)

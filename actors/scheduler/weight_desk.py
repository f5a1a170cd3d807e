"""An engine's side of updates of weights: a coordinator's orders, and what holds without one.

    stage     the version's file is here, its digest is right, all runners can serve it: NEXT
    pause     soon no step is in flight
    commit    NEXT is CURRENT, the runners compute by it
    resume

A scheduler that begins reads CURRENT. A paused engine that no coordinator asks for has one started,
which ends what is undone.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rayfin.actors import failpoints
from rayfin.actors.errors import EngineUnavailable, InvalidConfig, RayfinError
from rayfin.actors.messages import Command
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.runner_group import RunnerGroup
from rayfin.actors.timing import (
    LOOP_COMMAND_SECONDS,
    MODEL_LOAD_SECONDS,
    WEIGHTS_ABANDONED_SECONDS,
    WEIGHTS_POLL_SECONDS,
    WEIGHTS_SILENT_SECONDS,
)
from rayfin.actors.weights.sources import place_version
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.version import EngineWeights, Vote, WeightOrder, WeightVersion

logger = logging.getLogger(__name__)

Call = Callable[[Callable[[Engine], Any], float], Any]
"""Calls a function in the thread that steps, and returns its answer within so many seconds."""


Fetch = Callable[[WeightVersion], Iterable[Any]]
"""Yields the bytes of a version's file from elsewhere, once they are wanted; nothing if nowhere."""


class WeightDesk:
    """Carries out a coordinator's orders for the engine ``name``.

    Args:
        hand_back: gives all requests to other engines.
        ask_for_coordinator: starts one unless there is one.
        fetch: a version's bytes, from an engine on another node.
    """

    def __init__(
        self,
        name: str,
        store: WeightStore,
        group: RunnerGroup,
        call: Call,
        hand_back: Callable[[], None],
        ask_for_coordinator: Callable[[], None],
        fetch: Fetch,
    ) -> None:
        self._name, self._group, self._call = name, group, call
        self._hand_back, self._ask, self._fetch = hand_back, ask_for_coordinator, fetch
        self.store = store
        self._votes: dict[tuple[int, str], Vote] = {}  # by number and digest of the version
        self._committing = threading.Lock()
        self._heard = time.monotonic()
        self._used = False  # an order has come

    def stage(self, version: WeightVersion, chunks: Sequence[Any] = ()) -> Vote:
        """Says whether the engine can serve a version, beside its steps.

        Raises:
            RayfinError: it cannot.
        """
        self._heard = time.monotonic()
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("weights.stage")
        begun = time.monotonic()
        try:
            version = place_version(self.store, version, chunks)
            if self._group.sleeps_deep:  # what is not there fits nothing
                self._call(lambda engine: engine.carry_out(Command.LOAD), MODEL_LOAD_SECONDS)
            vote = self._group.vote(version)
        except RayfinError as error:
            self._count(version, begun, "refused" if error.status < 500 else "failed")
            raise
        self._count(version, begun)
        self._votes = {(version.serial, version.digest): vote}
        return vote

    def _count(self, version: WeightVersion, begun: float, result: str = "") -> None:
        seconds, source = time.monotonic() - begun, "path"
        if Path(version.place).parent == self.store.folder:
            source = "sent"
        size = 0 if result else sum(path.stat().st_size for path in version.files)

        def count(engine: Engine) -> None:
            counters = engine.lifecycle.state.counters
            counters.weight_update_seconds["stage"] += seconds
            counters.weight_bytes[source] += size
            if result:
                counters.weight_updates[result] += 1

        self._do(count)

    def carry_out(self, order: WeightOrder) -> EngineWeights:
        """Carries out an order; one that was carried out does nothing.

        Raises:
            EngineUnavailable: it takes too long, or the engine has failed.
            InvalidConfig: the version to commit is not on this node.
        """
        self._heard, self._used = time.monotonic(), True
        match order.what:
            case "pause":
                self._do(lambda engine: engine.updates.pause(order.mode, order.new))
            case "commit":
                with self._committing:
                    self._commit(order)
            case "resume":
                if failpoints.ACTIVE:
                    failpoints.ACTIVE.hit("weights.resume")
                self._do(lambda engine: engine.updates.resume())
            case "drop":
                self.store.drop()
            case "leave":
                self._do(self._leave)
            case "hand_back":
                self._hand_back()
        return self.state()

    @staticmethod
    def _leave(engine: Engine) -> None:
        if engine.state == "serving":  # what waits for an engine that sleeps goes nowhere
            engine.updates.leave()

    def state(self) -> EngineWeights:
        """What the engine says of its weights."""
        proposed = self.store.proposed
        number = None if proposed is None else proposed.serial
        weights: EngineWeights = self._do(lambda engine: engine.updates.state(number))
        return weights

    def _commit(self, order: WeightOrder) -> None:
        state = self.state()
        if state.version.serial >= order.version.serial:
            return
        decided = order.version
        if self.store.current.serial < decided.serial:
            decided = _placed(self.store, decided, self._fetch)
        if not state.pausing:  # this scheduler began after the pause
            self._do(lambda engine: engine.updates.pause("keep", order.new))
        deadline = time.monotonic() + LOOP_COMMAND_SECONDS
        while not self.state().paused:
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"engine {self._name} does not pause")
            time.sleep(WEIGHTS_POLL_SECONDS)
        version = self.store.commit(decided)
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("weights.current")
        vote = self._votes.get((version.serial, version.digest)) or self._group.vote(version)

        def turn(engine: Engine) -> None:
            counters, begun = engine.lifecycle.state.counters, time.monotonic()
            engine.updates.commit(version, in_place=vote.in_place, pages=order.pages)
            counters.weight_update_seconds["commit"] += time.monotonic() - begun
            counters.weight_updates["done"] += 1

        self._call(turn, MODEL_LOAD_SECONDS)
        if failpoints.ACTIVE:
            failpoints.ACTIVE.hit("weights.reply")

    def _do(self, ask: Callable[[Engine], Any]) -> Any:
        return self._call(ask, LOOP_COMMAND_SECONDS)

    def watch(self) -> None:
        """Sees to it, in a thread, that no pause outlives its coordinator."""
        threading.Thread(target=self._watch, name="weights", daemon=True).start()

    def _watch(self) -> None:
        handed_back = False
        while True:
            self.store.touch()
            time.sleep(WEIGHTS_SILENT_SECONDS / 10)
            silent = time.monotonic() - self._heard
            if silent < WEIGHTS_SILENT_SECONDS / 3 or not (
                self._used or self._group.version.serial
            ):
                handed_back = False
                continue
            try:
                state = self.state()
                held = state.pausing or state.leaving
                if state.version.serial or held:  # who joins asks it what is decided
                    self._ask()
                if not held:
                    continue
                if silent < WEIGHTS_SILENT_SECONDS:
                    continue
                if state.proposed is None or state.proposed <= state.version.serial:
                    logger.warning(
                        "engine %s resumes: no coordinator knows of its pause", self._name
                    )
                    self._do(lambda engine: engine.updates.resume())
                elif not handed_back:  # it may have been decided, or not
                    handed_back = True
                    self._hand_back()
            except Exception as error:  # of Ray's registry, or of an engine that has failed
                logger.warning("engine %s stays paused: %s", self._name, error)


def catch_up(engine: Engine, decided: WeightVersion) -> None:
    """Gives an engine that takes orders from now on, and has no requests yet, what was decided
    while it was loaded: that went past it."""
    if decided.serial > engine.updates.version.serial:
        engine.updates.pause("keep")
        engine.updates.commit(decided, in_place=False, pages="recompute")
        engine.updates.resume()


def joined_version(store: WeightStore, decided: WeightVersion, fetch: Fetch) -> WeightVersion:
    """The version of an engine that begins: CURRENT, or what was decided while it was not there.

    Raises:
        InvalidConfig: its tensors are neither on this node nor where they can be fetched.
    """
    if decided.is_base:
        store.forget(WEIGHTS_ABANDONED_SECONDS)
    if (current := store.current).serial >= decided.serial:
        return current
    return store.commit(_placed(store, decided, fetch))


def _placed(store: WeightStore, decided: WeightVersion, fetch: Fetch) -> WeightVersion:
    """The version as it is proposed here, now if it was not.

    Raises:
        InvalidConfig: its tensors are neither on this node nor where they can be fetched.
    """
    try:
        return place_version(store, decided, fetch(decided))
    except RayfinError as error:
        raise InvalidConfig(
            f"weights {decided.label!r} are not on this node: send them again ({error})", "weights"
        ) from None

"""All engines serve a version or none does, whatever dies amid it."""

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rayfin.actors.errors import EngineBusy, EngineUnavailable, InvalidRequest
from rayfin.actors.weights.coordinator import WeightCoordinator
from rayfin.actors.weights.version import EngineWeights, Vote, WeightOrder, WeightVersion

NEW = WeightVersion(0, "step-1", "d1", "/somewhere")


class Clock:
    """Time that passes while somebody sleeps."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Node:
    """One engine with its store: what is decided outlives its process."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.current, self.next = WeightVersion(), None
        self.up_at = 0.0
        self.start()

    def start(self) -> None:
        """A new process asks the coordinator what was decided, then serves CURRENT."""
        self.down = False
        asked = self.world.asked
        decided = WeightVersion() if asked is None else asked.decided
        if self.current.serial < decided.serial:
            self.current = decided
        self.serves, self.mode, self.steps_left = self.current, None, 0
        self.leaving, self.requests = False, 0

    @property
    def paused(self) -> bool:
        return self.mode is not None and not self.steps_left

    async def answer(self, what: str) -> None:
        await asyncio.sleep(0)
        if self.world.clock.now < self.up_at:
            raise EngineUnavailable("it is gone")
        if self.down:
            self.start()
        self.world.before(self, what)

    async def stage(self, version: WeightVersion, chunks: Sequence[Any]) -> Vote:
        await self.answer("stage")
        if self.world.refuses is self:
            raise InvalidRequest("it does not fit", "weights")
        self.next = version
        self.world.after(self, "stage")
        return Vote(in_place=True)

    async def order(self, order: WeightOrder) -> EngineWeights:
        await self.answer(order.what)
        match order.what:
            case "pause":
                self.mode, self.steps_left = order.mode, 2
            case "commit" if self.serves.serial < order.version.serial:
                self.mode = self.mode or "keep"
                self.steps_left = 0
                if self.current.serial < order.version.serial:
                    self.current, self.next = order.version, None
                self.world.between(self)
                self.serves = self.current
            case "resume":
                self.mode, self.leaving = None, False
            case "leave":
                self.leaving = True
            case "hand_back":
                self.requests = 0
            case "drop":
                self.next = None
        self.steps_left = max(self.steps_left - 1, 0)
        self.world.after(self, order.what)
        proposed = None if self.next is None else self.next.serial
        held = self.paused, self.mode is not None, self.leaving
        return EngineWeights(self.serves, proposed, *held, self.requests)


class World:
    """Some engines, and a plan of deaths: (call, when) -> seconds until it is back."""

    def __init__(self, engines: int, deaths: Mapping[tuple[str, str], float] | None = None) -> None:
        self.clock, self.deaths = Clock(), dict(deaths or {})
        self.refuses: Node | None = None
        self.asked: WeightCoordinator | None = None  # the coordinator that lives
        self.nodes = {f"app/engine/{number}": Node(self) for number in range(engines)}
        self.serving: set[tuple[int, ...]] = set()  # serials that served together, after each call

    async def find(self) -> Mapping[str, Node]:
        return {name: own for name, own in self.nodes.items() if self.clock.now >= own.up_at}

    def coordinator(self) -> WeightCoordinator:
        self.asked = WeightCoordinator(self.find, self.clock, self.clock.sleep)
        return self.asked

    def before(self, node: Node, what: str) -> None:
        self._die(node, what, "before")

    def between(self, node: Node) -> None:
        self._die(node, "commit", "amid")

    def after(self, node: Node, what: str) -> None:
        up = [own for own in self.nodes.values() if not own.down]
        running = [own.serves.serial for own in up if own.mode is None]
        self.serving.add(tuple(sorted(set(running))))
        self._die(node, what, "after")

    def _die(self, node: Node, what: str, when: str) -> None:
        seconds = self.deaths.pop((what, when), None)
        if seconds is not None:
            node.up_at, node.down = self.clock.now + seconds, True
            raise EngineUnavailable("it has died")

    def serials(self) -> set[int]:
        for node in self.nodes.values():
            if node.down and self.clock.now >= node.up_at:
                node.start()
        return {own.serves.serial for own in self.nodes.values()}


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_an_update_of_all() -> None:
    world = World(3)
    coordinator = world.coordinator()
    report = run(coordinator.update(NEW))
    assert report.version == WeightVersion(1, "step-1", "d1", "/somewhere") and report.engines == 3
    assert world.serials() == {1} and all(own.mode is None for own in world.nodes.values())
    assert all(len(together) <= 1 for together in world.serving), "two versions at once"
    again = run(coordinator.update(NEW))  # of what is current
    assert again.version.serial == 1 and again.pause_seconds == 0


def test_one_no_ends_it_and_nobody_was_paused() -> None:
    world = World(3)
    world.refuses = list(world.nodes.values())[1]
    with pytest.raises(InvalidRequest, match="does not fit"):
        run(world.coordinator().update(NEW))
    assert world.serials() == {0} and all(own.next is None for own in world.nodes.values())
    world.refuses = None
    assert run(world.coordinator().update(NEW)).version.serial == 1


def test_a_second_one_is_told_of_the_first() -> None:
    async def both() -> None:
        coordinator = World(2).coordinator()
        first = asyncio.create_task(coordinator.update(NEW))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="update 'step-1' is amid"):
            await coordinator.update(NEW)
        assert (await first).version.serial == 1

    run(both())


@pytest.mark.parametrize("turns", range(30))
def test_one_that_is_abandoned_is_done_or_undone(turns: int) -> None:
    """Before the decision engines go on as they are; after it nothing ends it."""

    async def abandon() -> None:
        world = World(2)
        coordinator = world.coordinator()
        work = asyncio.create_task(coordinator.update(NEW))
        for _ in range(turns):
            await asyncio.sleep(0)
        coordinator.abandon()
        (answer,) = await asyncio.gather(work, return_exceptions=True)
        done = not isinstance(answer, EngineBusy)
        assert world.serials() == {int(done)}
        assert all(own.mode is own.next is None for own in world.nodes.values())
        assert (await coordinator.update(NEW)).version.serial == 1

    run(abandon())


CALLS = ("state", "stage", "pause", "commit", "resume")


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("away", [0.5, 5.0])
def test_an_engine_dies_anywhere(engines: int, away: float) -> None:
    moments = [*itertools.product(CALLS, ("before", "after")), ("commit", "amid")]
    for moment in moments:
        world = World(engines, {moment: away})
        report = run(world.coordinator().update(NEW))
        run(world.clock.sleep(away))
        assert world.serials() == {report.version.serial} == {1}, moment
        assert all(len(together) <= 1 for together in world.serving), moment


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("away", [0.5, 5.0])
def test_one_after_the_other(engines: int, away: float) -> None:
    """At most one is paused, whatever dies; at the end all serve it."""

    class Turns(World):
        most = 0

        def after(self, node: Node, what: str) -> None:
            paused = [own for own in self.nodes.values() if own.mode is not None and not own.down]
            self.most = max(self.most, len(paused))
            super().after(node, what)

    calls = (*CALLS, "leave", "hand_back")
    moments = [*itertools.product(calls, ("before", "after")), ("commit", "amid")]
    for moment in [None, *moments]:
        world = Turns(engines, {} if moment is None else {moment: away})
        for node in world.nodes.values():
            node.requests = 5  # that do not move by themselves
        report = run(world.coordinator().update(NEW, order="in_turn"))
        run(world.clock.sleep(away))
        assert world.serials() == {report.version.serial} == {1}, moment
        assert world.most == 1 and all(own.mode is None for own in world.nodes.values()), moment
        assert not any(own.leaving for own in world.nodes.values()), moment
        if moment is None:  # an engine alone has nowhere to hand them
            assert sum(own.requests for own in world.nodes.values()) == (0 if engines > 1 else 5)


@pytest.mark.parametrize("what", CALLS)
def test_a_coordinator_dies_anywhere(what: str) -> None:
    """The next one completes what was decided, drops what was not, and resumes all."""

    async def both(world: World, calls: int) -> None:
        work = asyncio.create_task(world.coordinator().update(NEW))
        for _ in range(calls):
            await asyncio.sleep(0)
        stopped = not work.done()
        work.cancel()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await world.coordinator().recover()
        await world.clock.sleep(0.2)
        assert len(world.serials()) == 1, calls
        assert all(own.mode is None for own in world.nodes.values()), calls
        assert all(len(together) <= 1 for together in world.serving), calls
        assert stopped or world.serials() == {1}

    for calls in range(0, 60):
        world = World(2, {(what, "after"): 0.1})
        run(both(world, calls))


def test_many_updates_under_many_deaths() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        moments = [*itertools.product(CALLS, ("before", "after")), ("commit", "amid")]
        deaths = {draw.choice(moments): draw.choice([0.1, 1.0, 8.0]) for _ in range(3)}
        world = World(draw.randint(1, 4), deaths)
        for number in range(1, 4):
            version = WeightVersion(0, f"step-{number}", f"d{number}", "/x")
            run(world.coordinator().update(version))
        run(world.clock.sleep(10.0))
        assert world.serials() == {3}, seed
        assert all(len(together) <= 1 for together in world.serving), seed


def test_a_pause_by_hand_ends_in_time() -> None:
    async def pause() -> None:
        world = World(2)
        coordinator = world.coordinator()
        watch = asyncio.create_task(coordinator.watch())
        await coordinator.pause("keep", "wait", seconds=30.0)
        assert all(own.paused for own in world.nodes.values())
        report = await coordinator.update(NEW)
        assert report.version.serial == 1 and all(own.paused for own in world.nodes.values())
        while world.clock.now < 60.0:
            await world.clock.sleep(1.0)
        assert all(own.mode is None for own in world.nodes.values())
        watch.cancel()

    run(pause())


def test_an_engine_that_was_cut_off_gets_what_was_decided() -> None:
    """It was out of reach for longer than an update waits; the bytes need not be sent again."""

    async def update() -> None:
        world = World(3)
        coordinator, cut = world.coordinator(), world.nodes["app/engine/1"]
        cut.up_at = 100.0
        assert (await coordinator.update(NEW)).version.serial == 1
        watch = asyncio.create_task(coordinator.watch())
        await world.clock.sleep(99.0 - world.clock.now)
        assert (cut.serves.serial, coordinator.decided.serial) == (0, 1)
        while world.clock.now < 150.0:
            await world.clock.sleep(1.0)
        assert world.serials() == {1} and all(own.mode is None for own in world.nodes.values())
        watch.cancel()

    async def send_again() -> None:
        world = World(2)
        world.nodes["app/engine/1"].up_at = 100.0
        await world.coordinator().update(NEW)
        await world.clock.sleep(100.0)
        assert world.serials() == {0, 1}
        assert (await world.coordinator().update(NEW)).version.serial == 2
        assert world.serials() == {2}

    run(update())
    run(send_again())


def test_a_registry_that_fails_amid_it() -> None:
    """Ray's registry restarts: what is decided is completed, and no engine stays paused."""

    async def update(fails: int) -> None:
        world, calls = World(2), itertools.count()

        async def find() -> Mapping[str, Node]:
            if next(calls) == fails:
                raise EngineUnavailable("the registry restarts")
            return await world.find()

        coordinator = WeightCoordinator(find, world.clock, world.clock.sleep)
        world.asked = coordinator
        await coordinator.update(NEW)
        assert world.serials() == {1}, fails
        assert all(own.mode is None for own in world.nodes.values()), fails

    for fails in range(12):
        run(update(fails))

"""An engine that was started ahead of its supervisor: who gets it, and when."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import (
    EngineUnavailable,
    InvalidConfig,
    NoRoomNow,
    StorageFull,
    UnsupportedModel,
)
from rayfin.actors.messages import EngineInfo
from rayfin.actors.scheduler import actor
from rayfin.actors.scheduler.actor import UNCLAIMED, EngineClaim, EngineStart, SchedulerActor
from rayfin.actors.supervision import adoption, early_engine, supervisor
from rayfin.actors.supervision.adoption import claim_engine
from rayfin.actors.supervision.early_engine import EarlyEngine
from rayfin.actors.supervision.supervisor import Supervisor
from rayfin.actors.timing import SPARE_AFTER_CLAIM_SECONDS

ARGS = EngineArgs(model="m", device="cpu")
OTHERS = EngineArgs(model="n", device="cpu")
INFO = EngineInfo("app/engine/0", 2048, 300, 64, 16)


def scheduler(monkeypatch: pytest.MonkeyPatch, args: EngineArgs | None) -> Any:
    """The actor's own class, without Ray."""
    monkeypatch.setattr(actor, "lower_priority", lambda: None)
    monkeypatch.setattr(actor, "_process", lambda: None)
    kind: Any = SchedulerActor
    own = kind.__ray_metadata__.modified_class("app/engine/0", ahead=args)
    monkeypatch.setattr(own, "_info", lambda: INFO)
    return own


def claim(own: Any, owner: str, args: EngineArgs = ARGS) -> EngineClaim:
    answer: EngineClaim = own.claim(owner, args, args.identity)
    return answer


def test_the_first_supervisor_gets_it_at_once_and_the_next_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = scheduler(monkeypatch, ARGS)
    own._started, own._engine = EngineStart(ARGS, owner=UNCLAIMED), object()
    first = claim(own, "first")
    assert first.granted and first.info == INFO
    again = claim(own, "first")
    assert again.granted and again.info == INFO, "its first answer may have come too late"
    second = claim(own, "second")
    assert not second.granted and second.compatible and not second.starting
    assert own._started.owner == "first"


def test_it_is_promised_before_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the call that starts it has come."""
    own = scheduler(monkeypatch, ARGS)
    early = claim(own, "first")
    assert early.starting and not early.granted
    own._started = EngineStart(ARGS, owner=UNCLAIMED)
    assert claim(own, "first").starting


def test_an_engine_of_other_settings_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = claim(scheduler(monkeypatch, ARGS), "first", OTHERS)
    assert not refused.starting and not refused.compatible


def test_an_engine_that_its_supervisor_starts_is_not_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = scheduler(monkeypatch, None)
    assert not claim(own, "other").starting
    own._started = EngineStart(ARGS, owner="its own")
    assert not claim(own, "other").starting


def test_a_supervisor_waits_for_an_engine_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        EngineClaim(False, True, starting=True),
        EngineClaim(False, True, starting=True),
        EngineClaim(True, True),
    ]

    async def ask(*_: Any) -> EngineClaim:
        return answers.pop(0)

    monkeypatch.setattr(adoption, "PULSE_SECONDS", 0.01)
    monkeypatch.setattr(adoption, "engine_names", lambda prefix: [f"{prefix}0"])
    monkeypatch.setattr(adoption, "find_actor", lambda name: object())
    monkeypatch.setattr(adoption, "_claim", ask)
    claimed = asyncio.run(claim_engine("app/engine/", "me", ARGS))
    assert claimed is not None and claimed[0] == "app/engine/0" and not answers


class SlowScheduler:
    """The handle of a scheduler whose answers to claims are these, one after the other."""

    def __init__(self, *answers: EngineClaim | Exception) -> None:
        self.answers = list(answers)
        self.claim = self

    async def remote(self, *_: Any) -> EngineClaim:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


STARTS = EngineClaim(False, True, starting=True)
GRANTED = EngineClaim(True, True)
LATE = TimeoutError()
AWAY = ActorUnavailableError("its node does not answer", None)


@pytest.mark.parametrize(
    ("answers", "claimed", "left"),
    [
        ([LATE, GRANTED], True, 0),
        ([LATE, AWAY, STARTS, LATE, LATE, GRANTED], True, 0),
        ([LATE, AWAY, LATE, GRANTED], False, 1),
        ([ActorDiedError(), GRANTED], False, 1),
    ],
    ids=["late", "late-now-and-then", "hung", "dead"],
)
def test_a_late_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    answers: list[EngineClaim | Exception],
    claimed: bool,
    left: int,
) -> None:
    """Else the supervisor would load the model a second time, beside the engine that starts."""
    slow = SlowScheduler(*answers)
    monkeypatch.setattr(adoption, "PULSE_SECONDS", 0.01)
    monkeypatch.setattr(adoption, "engine_names", lambda prefix: [f"{prefix}0"])
    monkeypatch.setattr(adoption, "find_actor", lambda name: slow)
    found = asyncio.run(claim_engine("app/engine/", "me", ARGS))
    assert (found is not None) == claimed and len(slow.answers) == left


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (InvalidConfig("a request needs 7 pages: lower max_model_len"), InvalidConfig),
        (UnsupportedModel("no decoder"), UnsupportedModel),
        (StorageFull("no room on the disk"), InvalidConfig),
        (NoRoomNow("a request needs 7 pages, 3 fit"), None),
        (EngineUnavailable("the runner has died"), None),
        (RuntimeError("the program ends"), None),
    ],
    ids=["refused", "unsupported", "disk", "memory", "died", "ended"],
)
def test_why_a_model_cannot_be_served_is_known_at_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    refusal: type[InvalidConfig] | None,
) -> None:
    """Serve reports it after several more loads, which may find more memory free."""

    class Refused(Supervisor):
        def place_ahead(self) -> None: ...

        async def launch_ahead(self) -> None:
            raise error

    class Now:
        """A thread that runs when it starts."""

        def __init__(self, *, target: Callable[[], None], **_: Any) -> None:
            self.start = target

    monkeypatch.setattr(early_engine, "Supervisor", Refused)
    monkeypatch.setattr(threading, "Thread", Now)
    with caplog.at_level(logging.INFO, logger=early_engine.__name__):
        engine = EarlyEngine(ARGS, "app/engine/")
    if refusal is None:
        assert engine.refusal is None
        assert [str(error) in each.getMessage() for each in caplog.records] == [True]
    else:
        assert type(engine.refusal) is refusal and str(engine.refusal) == str(error)
        assert not caplog.records


def test_what_fails_after_ray_has_ended_starts_no_other_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's calls to end actors start a Ray where none runs."""
    called: list[str] = []

    class Gone(Supervisor):
        async def _launch(self) -> EngineInfo:
            raise RuntimeError("Ray has ended")

    running = [False]
    monkeypatch.setattr(ray, "is_initialized", lambda: running[0])
    monkeypatch.setattr(ray, "kill", lambda own: called.append("kill"))
    monkeypatch.setattr(supervisor, "kill_named", called.append)
    own = Gone(ARGS, "app/engine/0", detached=True)
    own._scheduler = object()
    for running[0] in (False, True):
        with pytest.raises(RuntimeError, match="has ended"):
            asyncio.run(own.launch_ahead())
        assert bool(called) == running[0]


def test_its_spare_runners_come_after_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take processors from the start of the rest."""

    class Spares:
        watched = 0

        def watch(self) -> None:
            self.watched += 1

        def rest(self, seconds: float) -> None:
            assert seconds == SPARE_AFTER_CLAIM_SECONDS and not self.watched

    class Group:
        version = None

        def __init__(self, *_: Any, **__: Any) -> None:
            self.spares, self.names = Spares(), dict[int, Any]()

        def start(self) -> None: ...

    tables = SimpleNamespace(page_size=16, index=None, restore=lambda names: None)
    engine = SimpleNamespace(
        stats=None,
        updates=SimpleNamespace(begin=lambda version: None),
        lifecycle=SimpleNamespace(state=SimpleNamespace(tables=tables)),
    )
    store = SimpleNamespace(touch=lambda: None)
    desk = SimpleNamespace(store=store, watch=lambda: None)
    for owner, watched in ((UNCLAIMED, 0), ("its own", 1)):
        own = scheduler(monkeypatch, ARGS)
        monkeypatch.setattr(actor, "RunnerGroup", Group)
        monkeypatch.setattr(actor, "Engine", lambda *_: engine)
        monkeypatch.setattr(actor, "WeightDesk", lambda *_: desk)
        monkeypatch.setattr(actor, "store_here", lambda *_: None)
        for name in ("joined_version", "catch_up", "decided_version"):
            monkeypatch.setattr(actor, name, lambda *_: None)
        monkeypatch.setattr(actor, "RunnerPinger", lambda *_: SimpleNamespace(watch=lambda: None))
        monkeypatch.setattr("rayfin.actors.scheduler.actor.log_status", lambda *_: None)
        monkeypatch.setattr(own, "_loop", lambda: None)
        own._lifeline = SimpleNamespace(
            watch=lambda: None, work=nullcontext, silence=0.0, heard=lambda: None
        )
        own.start(EngineStart(ARGS, owner=owner))
        assert own._group.spares.watched == watched
        if owner == UNCLAIMED:
            claim(own, "first")
            assert own._group.spares.watched == 1

"""A profile of a runner's steps, as a Chrome trace with the scheduler's spans beside them."""

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from rayfin.actors.errors import EngineBusy, InvalidRequest
from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.parts import Need
from rayfin.actors.profile import ProfileFacts, ProfileOrder, SchedulerSpan
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.parts.model_part import ModelPart
from rayfin.actors.timing import PROFILE_STEP_SECONDS


class ProfilePart(ModelPart):
    """Carries out each ``ProfileOrder``."""

    facts = ProfileFacts()
    follows_weights = True

    def __init__(self, folder: str) -> None:
        self._profiler = StepProfiler(Path(folder))
        self.observers = (self._profiler,)

    def prepare(self, needs: Sequence[Need], *, at_once: bool = False) -> None:
        for order in (need.what for need in needs):
            if isinstance(order, ProfileOrder):
                (self._profiler.stop if order.stop else self._profiler.start)(order)


class StepProfiler(Observer):
    """Profiles the steps after an order. Orders come from another thread than steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.in_turn = False  # during a profile: then no step is queued ahead
        self._order: ProfileOrder | None = None
        self._steps = 0  # since the order
        self._profile: Any = None  # from its first step on
        self._span: Any = None  # of the step that runs
        self._changes = threading.Condition()

    def start(self, order: ProfileOrder) -> None:
        """Raises:
        EngineBusy: a profile is taken already.
        """
        with self._changes:
            if self._order is not None:
                raise EngineBusy("a profile is being taken; /stop_profile ends it")
            self.in_turn, self._order, self._steps = True, order, 0

    def stop(self, order: ProfileOrder) -> None:
        """Ends the profile and writes it.

        Raises:
            EngineBusy: none is taken.
            InvalidRequest: its folder cannot be written.
        """
        with self._changes:
            if (begun := self._order) is None:
                raise EngineBusy("no profile is being taken; /start_profile begins one")
            self._changes.wait_for(lambda: self._span is None, PROFILE_STEP_SECONDS)
            profile, self._order, self._profile, self._span = self._profile, None, None, None
            self.in_turn = False
            if profile is not None and self._steps < begun.delay + begun.steps:
                profile.stop()
        name = f"{begun.prefix}{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(profile, order.spans, self._folder / name)
        except (OSError, RuntimeError) as error:
            raise InvalidRequest(f"the profile cannot be written: {error}", "profile_dir") from None

    def before(self, info: SchedulerInfo) -> None:
        with self._changes:
            self._end_span()  # of a step that has failed
            order = self._order
            if order is None or not order.delay <= self._steps < order.delay + order.steps:
                return
            if self._profile is None:
                every_thread = _ExperimentalConfig(profile_all_threads=True)
                self._profile = torch.profiler.profile(experimental_config=every_thread)
                self._profile.start()
            self._span = torch.profiler.record_function(f"step {info.epoch}.{info.step}")
            self._span.__enter__()

    def after(self, info: SchedulerInfo, result: StepResult) -> None:
        if self._order is None:
            return
        with self._changes:
            self._end_span()
            self._steps += 1
            order = self._order
            if order is not None and self._steps == order.delay + order.steps:
                self._profile.stop()

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
            self._changes.notify_all()


def write(profile: Any, spans: Sequence[SchedulerSpan], file: Path) -> None:
    """Writes a profile as a Chrome trace, with spans of the scheduler on the same clock."""
    trace: dict[str, Any] = {"traceEvents": [], "baseTimeNanoseconds": 0}
    if profile is not None:
        profile.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8"))
    base = trace["baseTimeNanoseconds"]
    trace["traceEvents"] += [
        {
            **{"ph": "X", "cat": "scheduler", "name": span.name, "pid": "scheduler"},
            **{"tid": index % 2, "ts": (span.begin - base) / 1000},  # two steps are in flight
            "dur": (span.end - span.begin) / 1000,
        }
        for index, span in enumerate(spans)
    ]
    part = file.with_suffix(".part")
    part.write_text(json.dumps(trace), encoding="utf-8")
    part.rename(file)

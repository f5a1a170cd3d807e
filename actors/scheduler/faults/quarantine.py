"""Finds requests that kill their runners, with few deaths and without blaming others.

Requests in flight when runners die become *suspects*. The suspect at the head of the queue is put
on *trial*: it runs alone, with one step in flight, until it has passed the point where it stood at
the death. Then it is cleared and keeps its slot and pages while the next suspect is tried. Once no
suspect is left, all run together. So a poisonous request has its second death alone, and only it is
blamed. A trial costs little more than the recomputation that follows a death anyway.

A runner that reports the step's exception convicts the request on trial. A runner that vanishes may
have died for another reason. Then it takes two trials in a row, that is, three dead runners.

Source of the idea: poison messages and dead letters of message queues.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from rayfin.actors.errors import RequestQuarantined
from rayfin.actors.messages import EngineRequest, Int64Array, SchedulerInfo, StepResult
from rayfin.actors.scheduler.admission import AdmissionGate
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.policy.step_scheduler import StepScheduler
from rayfin.actors.scheduler.policy.token_scheduler import take_chunk
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.step_builder import Chunk
from rayfin.actors.timing import BLOCKED_PROMPT_SECONDS

MAX_BLOCKED = 1024
"""Most prompts of convicted requests that are refused."""

SILENT_DEATHS = 2
"""Deaths on trial that convict if the runner did not report an exception of the step."""

MAX_ENGINE_DEATHS = 8
"""A request that was in flight at so many deaths of engines is refused."""

SAME_PROMPT = "a request with this prompt has killed its runners"


class Quarantine:
    """Suspects, their trials, and blocked prompts: a scheduler around ``scheduler``.

    Outside of trials ``scheduler`` decides alone, with up to ``steps_in_flight`` steps in flight.
    A trial waits until ``parts`` admits its request: after the trial the request runs beside
    those that run now, and a step can have only so many adapters.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        scheduler: StepScheduler,
        parts: AdmissionGate,
        steps_in_flight: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._parts = parts
        self._steps_in_flight = steps_in_flight
        self._clock = clock
        self._suspects: dict[Request, int] = {}  # -> tokens at which it is cleared
        self._tried: Request | None = None
        self._blocked: OrderedDict[bytes, float] = OrderedDict()  # prompt -> until when

    @property
    def depth(self) -> int:
        """How many steps may be in flight; one during a trial and before it."""
        return 1 if self._suspects and self._has_trial() else self._steps_in_flight()

    @property
    def num_suspects(self) -> int:
        """Requests that were in flight when runners died, and are not cleared."""
        return len(self._suspects)

    def check(self, source: EngineRequest) -> None:
        """Refuses blocked prompts.

        Raises:
            RequestQuarantined: the same prompt killed its runners, or too many engines.
        """
        if source.deaths >= MAX_ENGINE_DEATHS:
            raise RequestQuarantined(f"{source.deaths} engines died with this request in flight")
        if not self._blocked:
            return
        now = self._clock()
        while self._blocked and next(iter(self._blocked.values())) <= now:
            self._blocked.popitem(last=False)
        if _digest(source) in self._blocked:
            raise RequestQuarantined(SAME_PROMPT)

    def watch(self, request: Request) -> None:
        """Makes a new request a suspect if engines died with it in flight."""
        if request.source.deaths:
            self._suspects[request] = request.num_tokens + 1

    def may_admit(self, request: Request) -> bool:
        """See ``AdmissionGate``: a suspect runs alone, in its trial."""
        return request not in self._suspects

    def longest_chunk(self, request: Request) -> int:
        """See ``StepScheduler``."""
        return self._scheduler.longest_chunk(request)

    def observe(self, info: SchedulerInfo, result: StepResult) -> None:
        """See ``StepScheduler``."""
        self._scheduler.observe(info, result)

    def discard(self, request: Request) -> None:
        """The request has ended."""
        self._suspects.pop(request, None)
        if request is self._tried:
            self._tried = None

    def died(self, in_flight: Iterable[Request], *, caused_by_step: bool) -> Request | None:
        """The runners have died with these requests in flight, which are not requeued yet.

        Args:
            caused_by_step: a runner reported an exception of the step.

        Returns:
            The request that is convicted, or None.
        """
        suspects = list(in_flight)
        for request in suspects:
            request.deaths += 1
            self._suspects[request] = self._mark(request)
        tried, self._tried = self._tried, None
        if tried is None or suspects != [tried]:
            return None
        tried.deaths_on_trial += 1
        return tried if caused_by_step or tried.deaths_on_trial >= SILENT_DEATHS else None

    def block(self, request: Request) -> RequestQuarantined:
        """Refuses the convicted request's prompt for a while; returns the error to end it with."""
        self._blocked[_digest(request.source)] = self._clock() + BLOCKED_PROMPT_SECONDS
        if len(self._blocked) > MAX_BLOCKED:
            self._blocked.popitem(last=False)
        return RequestQuarantined(
            f"the model's process died {request.deaths + request.source.deaths} times with this "
            "request in flight"
        )

    def same_prompt(self, convicted: Request, live: Iterable[Request]) -> list[Request]:
        """Requests with the convicted one's prompt that are suspects, or have no token yet.

        Each would cost two more deaths alone. One that has answered since is innocent.
        """
        digest = _digest(convicted.source)
        return [
            request
            for request in live
            if request is not convicted
            and (request in self._suspects or request.num_tokens == len(request.source.prompt))
            and _digest(request.source) == digest
        ]

    def schedule(self) -> tuple[Int64Array, list[Chunk]]:
        """The next step of a trial, or of all others if there is no trial or no room for it."""
        if not self._suspects or not self._has_trial():
            return self._scheduler.schedule()
        tried = self._tried
        if tried is None or tried.slot is None or self._is_cleared(tried):
            if tried is not None and tried.slot is not None:
                self._clear(tried)
            tried = self._tried = self._next()
        if tried is None:
            return self._scheduler.schedule()
        running = self._lifecycle.state.running
        slot = tried.slots[0]
        if slot in running.prefilling:
            nothing = np.zeros(0, np.int64)
            self._lifecycle.make_room(nothing)
            if tried.slot is None:  # the room was its own
                return nothing, []
            length = self._scheduler.longest_chunk(tried)
            return nothing, [take_chunk(self._lifecycle, slot, length)]
        decodable = running.decodable()
        slots = decodable[np.isin(decodable, tried.slots)]
        decoding, _ = self._lifecycle.make_room(slots)
        return decoding, []

    def _has_trial(self) -> bool:
        if self._tried is not None and self._tried.slot is not None:
            return True
        return self._lifecycle.state.waiting.peek() in self._suspects

    def _next(self) -> Request | None:
        """Admits the suspect at the head of the queue, or returns None if there is no room."""
        request = self._lifecycle.state.waiting.peek()
        if request is None or request not in self._suspects:
            return None
        admission = self._lifecycle.admission
        if not (self._parts.may_admit(request) and admission.has_room(request, 0)):
            return None
        if admission.overtakes(request):
            return None
        self._lifecycle.admit()
        return request

    def _is_cleared(self, request: Request) -> bool:
        running, slot = self._lifecycle.state.running, request.slots[0]
        if slot in running.prefilling or running.num_pending[slot]:
            return False
        if request.source.beams is not None:
            return request.search is not None
        return int(running.num_known[slot]) >= self._suspects.get(request, 0)

    def _clear(self, request: Request) -> None:
        self._suspects.pop(request, None)
        request.deaths = request.deaths_on_trial = 0

    def _mark(self, request: Request) -> int:
        """Tokens that the request would have after the steps in flight."""
        if request.slot is None:
            return request.num_tokens + 1
        running, slot = self._lifecycle.state.running, request.slots[0]
        mark = int(running.num_known[slot] + max(1, running.num_pending[slot]))
        return min(mark, int(running.stops.cap[slot]))


def _digest(source: EngineRequest) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(source.prompt, np.int32).tobytes()).digest()

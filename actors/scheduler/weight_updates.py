"""Pauses an engine, and changes its weights between two steps.

    pause    only what has had a slot goes on; soon no step is in flight, and nothing is undelivered
    commit   the index is emptied, the runners compute by the new version under a new epoch
    resume   what ran goes on, by its token log or over its pages; what waits is admitted

A pause is no state of the policy: it is an ``AdmissionGate``, and a depth of 0 steps.
"""

from collections.abc import Callable

from rayfin.actors.errors import (
    EngineBusy,
    EnginePaused,
    RequestHandedBack,
    RunnerGroupFailed,
)
from rayfin.actors.messages import EngineRequest, TokenDeltas
from rayfin.actors.parts import first_of
from rayfin.actors.scheduler.endings import Endings
from rayfin.actors.scheduler.lifecycle import Lifecycle
from rayfin.actors.scheduler.outbox import Outbox
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.step_pipeline import StepPipeline
from rayfin.actors.weights.version import (
    EngineWeights,
    KeptPages,
    NewRequests,
    PauseMode,
    WantedWeights,
    WeightVersion,
)


class WeightUpdates:
    """Pause and version of one engine. One thread calls it: the one that steps.

    Args:
        replace: replaces runners that have died.
        asleep: whether the runners have no pages.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        pipeline: StepPipeline,
        endings: Endings,
        outbox: Outbox,
        replace: Callable[[RunnerGroupFailed], None],
        clock: Callable[[], float],
        asleep: Callable[[], bool],
    ) -> None:
        self.version = WeightVersion()
        self._lifecycle, self._pipeline, self._endings = lifecycle, pipeline, endings
        self._outbox, self._replace, self._clock, self._asleep = outbox, replace, clock, asleep
        self._mode: PauseMode | None = None
        self._new: NewRequests = "wait"
        self.leaving = False  # requests go to other engines
        self._since = 0.0
        self.resumed_at = clock()  # the end of the last pause
        self._mixed: set[Request] = set()  # they run over keys and values of another version

    def begin(self, version: WeightVersion) -> None:
        """The runners compute by ``version`` from the start on."""
        self.version = version
        self._endings.logs.label = version.label
        self._lifecycle.tier.turn(version.digest)

    def state(self, proposed: int | None) -> EngineWeights:
        """What the engine says of its weights, with the number of the version it has voted for."""
        held = self.is_paused, self._mode is not None, self.leaving
        return EngineWeights(self.version, proposed, *held, len(self._lifecycle.state.live))

    def check(self, source: EngineRequest) -> None:
        """Refuses a new request, if the pause says so; one with output comes from elsewhere.

        Raises:
            RequestHandedBack: it is to go elsewhere.
            EnginePaused: it is to come again.
            EngineBusy: it wants other weights.
        """
        if self.leaving:
            raise RequestHandedBack("this engine changes its weights")
        if (wanted := _wanted(source)) is not None:
            wanted.require(self.version)
        if self._mode is not None and self._new == "refuse" and not source.output:
            raise EnginePaused("this engine is paused for new weights")

    def may_admit(self, request: Request) -> bool:
        """As an ``AdmissionGate``: while it pauses, what had a slot before, with its choices.

        All requests, while a prompt that is scored in part waits: it may be behind them.
        """
        if self._mode is None or request.admitted or self._scores(waiting=True):
            return True
        parent = request.fork_parent
        return self._mode == "wait" and parent is not None and parent.admitted

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be submitted: nothing is left to do before the pause."""
        if self._mode is None:
            return False
        if self._scores():
            return False
        if self._mode == "wait":
            return not len(self._lifecycle.state.running) and not self._readmits
        return True

    def _scores(self, *, waiting: bool = False) -> bool:
        """Whether a prompt has log probabilities in part: all of them are of one version.

        Args:
            waiting: of those alone that were preempted.
        """
        return any(
            request.scoring and request.admitted and not (waiting and request.slots)
            for request in self._lifecycle.state.live.values()
        )

    @property
    def _readmits(self) -> bool:
        """Whether a request waits that ran before, or whose first choice did."""
        first = self._lifecycle.state.waiting.peek()
        return first is not None and self.may_admit(first)

    @property
    def is_paused(self) -> bool:
        """Whether no step is in flight, none will be, and all output is on its way."""
        if self._mode is None or self._pipeline or self._outbox.has_output:
            return False
        return self.holds_steps

    def pause(self, mode: PauseMode, new: NewRequests = "wait") -> None:
        """Begins a pause; ``is_paused`` tells when it has come.

        Args:
            mode: what running requests do meanwhile.
            new: what requests do that come meanwhile.
        """
        if self._mode is None:
            self._since = self._clock()
        again, self._mode, self._new = mode == self._mode, mode, new
        if mode == "abort" and not again:  # what has come since waits
            for request in list(self._lifecycle.state.live.values()):
                self._endings.end(request, "abort")

    def leave(self) -> None:
        """Takes no more requests until ``resume``, and lets clients move those that it has."""
        self.leaving = True
        if (seats := self._lifecycle.seats) is not None:  # whose next turns come elsewhere
            seats.forget()

    def resume(self) -> None:
        """Ends the pause, if there is one."""
        self.leaving = False
        if self._mode is not None:
            self.resumed_at = self._clock()
            self._lifecycle.state.counters.pause_seconds += self.resumed_at - self._since
            self._mode = None

    def commit(self, version: WeightVersion, *, in_place: bool, pages: KeptPages) -> None:
        """Makes the runners compute by ``version``, unless they do.

        Args:
            in_place: they can change their weights; else they are replaced.
            pages: what becomes of the pages of what runs; replaced runners have none.

        Raises:
            EngineBusy: it is not paused.
        """
        if version.serial <= self.version.serial:
            return
        if not self.is_paused:
            raise EngineBusy("weights are changed while an engine is paused")
        lifecycle = self._lifecycle
        self._note_spans()
        running = lifecycle.state.running.holders()
        kept = pages == "keep" and in_place
        lifecycle.state.counters.carried_requests["kept" if kept else "recomputed"] += len(running)
        if not in_place:
            lifecycle.restart()
            lifecycle.tier.turn(version.digest)
        elif kept:
            lifecycle.keep_over(version.digest)
        else:
            lifecycle.carry_over(version.digest)
        self._mixed = {request for request in running if request.mixed}
        self.version = version
        self._endings.logs.label = version.label
        self._end_unwanted()
        try:
            self._pipeline.turn(version, in_place=in_place, asleep=self._asleep())
            if not in_place:
                lifecycle.resume()
        except RunnerGroupFailed as failure:  # its successor loads the version
            self._replace(failure)

    def _end_unwanted(self) -> None:
        """Ends requests that wait for weights that are no more."""
        for request in list(self._lifecycle.state.live.values()):
            wanted = None if request.admitted else _wanted(request.source)
            try:
                if wanted is not None:
                    wanted.require(self.version)
            except EngineBusy as error:
                self._endings.end(request, "error", error=error)

    def _note_spans(self) -> None:
        """Tells each live request which version has made its tokens so far."""
        running = self._lifecycle.state.running
        for request in self._lifecycle.state.live.values():
            slot = request.slot
            known = request.num_tokens if slot is None else int(running.num_known[slot])
            tokens = known - len(request.source.prompt)
            request.spans = request.spans_up_to(tokens, self.version.label)

    def label(self, messages: dict[str, TokenDeltas]) -> dict[str, TokenDeltas]:
        """Writes the version into messages of tokens that it has made."""
        for client, message in messages.items():
            message.weights = self.version.label
            if self._mixed:
                mine = (
                    request.source for request in self._mixed if request.source.client == client
                )
                message.kept = frozenset(source.key for source in mine)
        if self._mixed:
            self._mixed = {
                request for request in self._mixed if request.mixed and not request.ended
            }
        return messages


def _wanted(source: EngineRequest) -> WantedWeights | None:
    """The weights that a request asks for; one with output has begun elsewhere."""
    return None if len(source.output) else first_of(source.parts, WantedWeights)

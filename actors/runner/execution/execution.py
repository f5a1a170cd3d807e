"""``StepExecution``: runs a call's rows as CUDA graphs, with drafts, or forward by forward."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from rayfin.actors.messages import Int64Array, SchedulerInfo
from rayfin.actors.parts import PartUsage
from rayfin.actors.runner.batch import decoding_rows, next_step_info
from rayfin.actors.runner.execution.draft_steps import DraftSteps
from rayfin.actors.runner.execution.forward import Forward
from rayfin.actors.runner.execution.graph_steps import GraphSteps
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampled, StepOutput, StepSampler
from rayfin.actors.runner.speculation.speculator import Speculator

if TYPE_CHECKING:
    from rayfin.actors.runner.gpu.graphs import MultiStepOutput


class PlainSteps:
    """Runs one step after the other, with the rows that still decode.

    Args:
        remember: keeps what a step has sampled, where the next one reads it.
    """

    def __init__(
        self,
        forward: Forward,
        slots: RequestSlots,
        sampler: StepSampler,
        remember: Callable[[SchedulerInfo, Sampled], None],
    ) -> None:
        self._forward, self._slots, self._sampler = forward, slots, sampler
        self._remember = remember

    def run(
        self,
        info: SchedulerInfo,
        rows: Int64Array,
        output: StepOutput,
        replayed: "MultiStepOutput | None" = None,
    ) -> None:
        """All decode steps of ``info``, which has the ``rows`` [R] of the call."""
        among = np.arange(len(rows))  # where the remaining rows stand among those of the replay
        for column in range(info.num_steps):
            if replayed is None:
                sampled = self._forward.run(info, output)
            else:
                sampled = self._sampler.replayed(
                    info, replayed.tokens[column, among], replayed.logprobs(column, among)
                )
            self._remember(info, sampled)
            output.add(rows, column, [sampled])
            if column + 1 == info.num_steps:
                break
            still_decoding = self._slots.still_decoding(info, sampled.tokens)
            rows, among = rows[still_decoding], among[still_decoding]
            info = next_step_info(info, still_decoding)
            if not len(rows):
                break


class StepExecution:
    """The ways of one start, which share its forward."""

    def __init__(
        self,
        forward: Forward,
        slots: RequestSlots,
        sampler: StepSampler,
        graphs: GraphSteps | None,
        speculator: Speculator | None,
    ) -> None:
        self._graphs = graphs
        self.speculator = speculator
        self._drafts: DraftSteps | None = None
        if speculator is not None:
            self._drafts = DraftSteps(forward, slots, speculator)

        def remember(info: SchedulerInfo, sampled: Sampled) -> None:
            if speculator is not None:
                speculator.remember(info, [sampled])
            else:
                slots.remember(info, sampled.tokens)

        self._plain = PlainSteps(forward, slots, sampler, remember)

    def begin(self, info: SchedulerInfo) -> SchedulerInfo:
        """Applies the step's diff; returns the step from where its rows really stand."""
        return info if self.speculator is None else self.speculator.begin(info)

    def run(self, info: SchedulerInfo, output: StepOutput) -> None:
        """All rows of a step; those that leave the CUDA graphs run while a graph runs the others.

        With a speculator one part runs after the other.
        """
        rows, graphs = np.arange(len(info.ids)), self._graphs
        host = None if graphs is None else graphs.leaves(info)
        if graphs is None or host is None or not host.any() or host.all():
            self._run(info, rows, output)
            return
        others, part = rows[~host], decoding_rows(info, rows[~host])
        queued = self.speculator is None and graphs.queue(part)
        try:
            self._run(decoding_rows(info, rows[host]), rows[host], output)
        finally:
            replayed = graphs.collect() if queued else None
        if self.speculator is not None:
            self._run(part, others, output)
        else:
            self._plain.run(part, others, output, replayed)

    def collect(
        self, info: SchedulerInfo, output: StepOutput, replayed: "MultiStepOutput | None"
    ) -> None:
        """All rows of a step that was queued ahead."""
        self._plain.run(info, np.arange(len(info.ids)), output, replayed)

    def take_usage(self) -> PartUsage | None:
        """What became of drafts since the last call, or None if there were none."""
        return None if self.speculator is None else self.speculator.take_usage()

    def _run(self, info: SchedulerInfo, rows: Int64Array, output: StepOutput) -> None:
        """All decode steps of ``info``, which has the ``rows`` [R] of the call."""
        if self._drafts is not None and self._drafts.run(
            info, rows, output, always=self._graphs is None
        ):
            return
        replayed = None if self._graphs is None else self._graphs.replay(info)
        self._plain.run(info, rows, output, replayed)

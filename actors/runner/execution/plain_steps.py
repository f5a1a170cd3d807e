"""The decode steps of a call without drafts: a forward for each, or what graphs have replayed."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from rayfin.actors.messages import Int64Array, SchedulerInfo
from rayfin.actors.runner.batch import next_step_info
from rayfin.actors.runner.execution.forward import Forward
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampled, StepOutput, StepSampler

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

"""The decode steps of a call with drafts: one forward computes them, and the right ones stay."""

import logging
import time

import torch

from rayfin.actors.messages import Int64Array, SchedulerInfo
from rayfin.actors.runner.batch import next_step_info
from rayfin.actors.runner.execution.failed_rows import leave_broken_device
from rayfin.actors.runner.execution.forward import Forward
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampled, StepOutput
from rayfin.actors.runner.speculation.speculator import Speculator, grants_of, last_tokens

logger = logging.getLogger(__name__)


class DraftSteps:
    """Runs steps with drafts where there are some, and others like any step."""

    def __init__(self, forward: Forward, slots: RequestSlots, speculator: Speculator) -> None:
        self._forward, self._slots, self._speculator = forward, slots, speculator

    def run(
        self, info: SchedulerInfo, rows: Int64Array, output: StepOutput, *, always: bool
    ) -> bool:
        """All decode steps of ``info``, which has the ``rows`` [R] of the call.

        Args:
            always: also if the first step has no drafts.

        Returns:
            Whether they have run.
        """
        left = grants_of(info)  # tokens that each row may sample in this call
        drafted = self._speculator.expand(info, left)
        if drafted is None and not always:
            return False
        for number in range(info.num_steps):
            started, drafting = time.perf_counter(), self._speculator.drafting
            results = self._verify(drafted) if drafted is not None else None
            step = info if drafted is None or results is None else drafted
            results = results or [self._forward.run(info, output)]
            counts = self._speculator.remember(step, results)
            output.add(rows, number, results)
            if len(rows) == info.decoding_batch:
                tokens, seconds = len(step.merge_prompt), time.perf_counter() - started
                drafts = tokens - len(rows)
                self._speculator.planner.observe(
                    *(tokens, drafts, len(rows), int(counts.sum()), seconds, drafting)
                )
            if number + 1 == info.num_steps:
                break
            left = left - counts
            last = last_tokens(results, counts)
            goes_on = self._slots.still_decoding(info, last, counts) & (left > 0)
            rows, left = rows[goes_on], left[goes_on]
            info = next_step_info(info, goes_on, counts)
            if not len(rows):
                break
            drafted = self._speculator.expand(info, left)
        return True

    def _verify(self, info: SchedulerInfo) -> list[Sampled] | None:
        """What a step with drafts gives; None if it fails: without them it shows the bad row."""
        try:
            return self._compute(info)
        except Exception as error:
            if self._forward.grouped:
                raise
            leave_broken_device(self._forward.device, error)
            logger.exception("a step with drafts failed: it runs without them")
            return None

    @torch.inference_mode()
    def _compute(self, info: SchedulerInfo) -> list[Sampled]:
        """One forward over the drafts; what is sampled as far as they are right."""
        inputs = self._forward.inputs(info)
        columns = self._speculator.columns(info)
        inputs.sampled = torch.from_numpy(columns.index).to(inputs.sampled)
        logits = self._forward.logits(info, inputs, columns.rows)
        return self._speculator.verify(info, columns, logits)

"""One forward over the rows of a step, and what it samples; a row at fault fails alone."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from rayfin.actors.messages import Int64Array, SchedulerInfo
from rayfin.actors.runner.batch import StepInputs, build_inputs
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.execution.failed_rows import (
    is_out_of_memory,
    isolate,
    leave_broken_device,
)
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import StepObserver
from rayfin.actors.runner.parallel.pipeline import PipelineTokenChannel
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampled, StepOutput, StepSampler

MAX_FAILED_STEPS = 3
"""Steps in a row without a row that could be computed: after more the runner is replaced."""


class Forward:
    """The model with the requests and the sampler of a start.

    Args:
        grouped: other ranks compute the same steps, so that none can repeat one alone.
    """

    def __init__(
        self, model: StepModel, page_size: int, device: torch.device, *, grouped: bool
    ) -> None:
        self.device = device
        self._model = model
        self._page_size = page_size
        self.grouped = grouped
        self._failed_steps = 0  # in a row, without a row that could be computed

    def start(
        self,
        slots: RequestSlots,
        sampler: StepSampler,
        observers: Sequence[StepObserver],
        relay: PipelineTokenChannel | None,
    ) -> None:
        """Takes what a start has made; ``relay`` hands on tokens in a pipeline."""
        self._slots, self._sampler, self._observers = slots, sampler, observers
        self._relay = relay

    def run(self, info: SchedulerInfo, output: StepOutput) -> Sampled:
        """One token for each row that samples; a row at fault fails alone.

        Raises:
            Exception: the model's own, if a step of several rows fails as a whole, or steps of one
                row have failed again and again: the requests are not at fault.
        """
        try:
            return self._compute(info)
        except Exception as error:
            if self.grouped:  # the ranks are amid this step
                raise
            leave_broken_device(self.device, error)
            output.result.out_of_memory |= is_out_of_memory(error)
            self._failed_steps += 1
            if self._failed_steps > MAX_FAILED_STEPS:
                raise
            sampled = isolate(self._compute, info, error)
            if len(sampled.errors) < len(info.ids):
                self._failed_steps = 0
            return sampled

    def inputs(self, info: SchedulerInfo) -> StepInputs:
        """The tensors of a step."""
        return build_inputs(info, self._slots, self._page_size, self.device)[0]

    def logits(self, info: SchedulerInfo, inputs: StepInputs, rows: Int64Array) -> torch.Tensor:
        """Logits [S + P, V]: the rows [S] sample from the first ones, the others are scored."""
        self._sampler.add_scored(info, inputs)
        logits = self._model.forward(inputs)
        for observer in self._observers:
            observer.forwarded(info, rows, logits)
        return logits

    def _compute(self, info: SchedulerInfo) -> Sampled:
        if self._relay:
            self._relay.before(info)
        # To enter the mode takes a tenth of a millisecond, and a compiled decoder needs none.
        mode = nullcontext if isinstance(self._model, CpuDecoder) else torch.inference_mode
        with mode():
            inputs, at = build_inputs(info, self._slots, self._page_size, self.device)
            logits = self.logits(info, inputs, at.rows)
            return (self._relay or self._sampler).sample(info, at, logits)

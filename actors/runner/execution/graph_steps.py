"""The steps of a call as CUDA graphs."""

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from rayfin.actors import failpoints
from rayfin.actors.config import BatchLimits, EngineArgs
from rayfin.actors.messages import BoolArray, SchedulerInfo
from rayfin.actors.runner.execution.failed_rows import leave_broken_device
from rayfin.actors.runner.loading import LoadedModel, reads_states
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import StepSampler
from rayfin.actors.runner.speculation.interface import DraftPart

if TYPE_CHECKING:
    from rayfin.actors.runner.gpu.graphs import DecodeGraphs, MultiStepOutput

logger = logging.getLogger(__name__)


class GraphSteps:
    """Queues calls that CUDA graphs can run, and collects what they have sampled.

    Args:
        grouped: other ranks compute the same steps, so that none can repeat one alone.
    """

    def __init__(
        self, graphs: "DecodeGraphs", sampler: StepSampler, device: torch.device, *, grouped: bool
    ) -> None:
        self.graphs = graphs
        self._grouped = grouped
        self._sampler = sampler
        self._device = device

    def leaves(self, info: SchedulerInfo) -> BoolArray:
        """[R] which rows of a step no CUDA graph can run, though it may run the others."""
        if not self.graphs.whole or len(info.ids) != info.decoding_batch:
            return np.zeros(len(info.ids), np.bool_)
        return self._sampler.needs_host(info) | self.graphs.left_out(info.ids)

    def replay(self, info: SchedulerInfo) -> "MultiStepOutput | None":
        """Runs the steps of the call; None if graphs cannot."""
        return self.collect() if self.queue(info) else None

    def queue(self, info: SchedulerInfo) -> bool:
        """Queues the steps of the call, unless graphs cannot run it."""
        if failpoints.ACTIVE or self._sampler.needs_host(info).any():
            return False
        rules = self._sampler.row_token_rules(info)
        if not self.graphs.supports(info, rules):
            return False
        try:
            self.graphs.begin(info, rules)
        except RuntimeError as error:  # step by step it shows which row is at fault
            self._report(error)
            return False
        return True

    def collect(self) -> "MultiStepOutput | None":
        """What the oldest queued call has sampled; None if it has failed."""
        try:
            return self.graphs.collect()
        except RuntimeError as error:
            self._report(error)
            return None

    def _report(self, error: RuntimeError) -> None:
        leave_broken_device(self._device, error)
        if self._grouped:
            raise error
        logger.exception("a multi-step call failed as a CUDA graph: it runs step by step")


def make_graphs(
    loaded: LoadedModel,
    args: EngineArgs,
    slots: RequestSlots,
    limits: BatchLimits,
    pages_per_request: int,
) -> "DecodeGraphs | None":
    """Records the model's decode steps; None if it has none that can be recorded."""
    if loaded.gpu_model is None or args.enforce_eager:
        return None
    from rayfin.actors.runner.gpu.graphs import DecodeGraphs

    drafts = loaded.part(DraftPart)
    return DecodeGraphs(
        loaded.gpu_model,
        slots,
        rows=limits.max_decoding_batch,
        pages_per_request=pages_per_request,
        page_size=args.page_size,
        max_num_steps=args.max_lease,
        max_tokens=limits.max_batch_tokens,
        device=loaded.device,
        draft=None if drafts is None else drafts.gpu_model,
        whole=not reads_states(args),
        drafts=drafts is not None,
        parts=loaded.parts,
    )

"""Sends the tokens of the last pipeline stage to the earlier stages.

Only the last stage has logits. An earlier stage starts its next step at once, and waits for tokens
only if that step needs them as input; meanwhile it computes prompts.
"""

from collections import deque

import numpy as np
import torch

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import NO_TOKEN, Int32Array, Int64Array, SchedulerInfo
from rayfin.actors.runner.batch import SampledRows
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampled, StepSampler


class PipelineTokenChannel:
    """Samples on the last stage, and receives its tokens on earlier stages."""

    def __init__(
        self, peers: ProcessGroups, slots: RequestSlots, sampler: StepSampler, config: EngineConfig
    ) -> None:
        self._peers = peers
        self._slots = slots
        self._sampler = sampler
        self._steps_in_flight = config.steps_in_flight
        self._awaited = deque[tuple[SchedulerInfo, Int64Array]]()  # steps, and rows that sample

    def before(self, info: SchedulerInfo) -> None:
        """Waits for the tokens that the step's inputs need."""
        starts = info.chunk_idx[: info.decoding_batch]
        unknown = info.ids[: info.decoding_batch][info.merge_prompt[starts] < 0]
        while any(np.isin(unknown, earlier.ids[rows]).any() for earlier, rows in self._awaited):
            self._settle_oldest()

    def sample(self, info: SchedulerInfo, at: SampledRows, logits: torch.Tensor) -> Sampled:
        """The step's tokens, or on an earlier stage NO_TOKEN for those not yet received."""
        rows = at.rows
        if self._peers.place.is_last:
            sampled = self._sampler.sample(info, at, logits)
            if len(rows):
                self._peers.send_tokens(sampled.tokens[rows])
            return sampled
        if info.num_steps > 1 and len(rows):  # they decide which rows still decode
            while self._awaited:
                self._settle_oldest()
            return Sampled(self._receive(info, rows))
        if len(rows):
            self._awaited.append((info, rows))
        while len(self._awaited) > self._steps_in_flight:  # not needed yet, but received
            self._settle_oldest()
        return Sampled(np.full(len(info.ids), NO_TOKEN, np.int32))

    def _settle_oldest(self) -> None:
        earlier, rows = self._awaited.popleft()
        self._slots.remember(earlier, self._receive(earlier, rows))

    def _receive(self, info: SchedulerInfo, rows: Int64Array) -> Int32Array:
        tokens = np.full(len(info.ids), NO_TOKEN, np.int32)
        tokens[rows] = self._peers.receive_tokens(len(rows))
        return tokens

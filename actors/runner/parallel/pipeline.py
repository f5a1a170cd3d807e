"""What the last stage samples, made known to the stages before it.

Only the last stage has logits. A stage before it goes on to its next step at once, and waits for
tokens where that step is to begin with them: in between it computes prompts.
"""

from collections import deque

import numpy as np
import torch

from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import NO_TOKEN, Int32Array, Int64Array, SchedulerInfo
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.sampling.sampler import Sampled, Sampler
from rayfin.actors.runner.step.batch import StepInputs
from rayfin.actors.runner.step.request_slots import RequestSlots


class PipelineTokenChannel:
    """Stands between a stage's forward and the step's result."""

    def __init__(
        self, peers: ProcessGroups, slots: RequestSlots, sampler: Sampler, config: EngineConfig
    ) -> None:
        self._peers = peers
        self._slots = slots
        self._sampler = sampler
        self._steps_in_flight = config.steps_in_flight
        self._awaited = deque[tuple[SchedulerInfo, Int64Array]]()  # steps, and rows that sample

    def before(self, info: SchedulerInfo) -> None:
        """The step's inputs are about to be built; some may be tokens that are on their way."""
        starts = info.chunk_idx[: info.decoding_batch]
        unknown = info.ids[: info.decoding_batch][info.merge_prompt[starts] < 0]
        while any(np.isin(unknown, earlier.ids[rows]).any() for earlier, rows in self._awaited):
            self._settle_oldest()

    def sample(self, info: SchedulerInfo, inputs: StepInputs, logits: torch.Tensor) -> Sampled:
        """The step's tokens; on a stage before the last NO_TOKEN for those that are to come."""
        rows = inputs.sampled_rows
        if self._peers.place.is_last:
            sampled = self._sampler.sample(info, inputs, logits)
            if len(rows):
                self._peers.send_tokens(sampled.tokens[rows])
            return sampled
        if info.num_steps > 1 and len(rows):  # which of its rows go on depends on them
            while self._awaited:
                self._settle_oldest()
            return Sampled(self._receive(info, rows))
        if len(rows):
            self._awaited.append((info, rows))
        while len(self._awaited) > self._steps_in_flight:  # nobody asks, but they have come
            self._settle_oldest()
        return Sampled(np.full(len(info.ids), NO_TOKEN, np.int32))

    def _settle_oldest(self) -> None:
        earlier, rows = self._awaited.popleft()
        self._slots.remember(earlier, self._receive(earlier, rows))

    def _receive(self, info: SchedulerInfo, rows: Int64Array) -> Int32Array:
        tokens = np.full(len(info.ids), NO_TOKEN, np.int32)
        tokens[rows] = self._peers.receive_tokens(len(rows))
        return tokens

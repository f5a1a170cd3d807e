"""From a step's logits to its tokens: processors, sampling, log probabilities, bad rows."""

from dataclasses import dataclass, field

import numpy as np
import torch

from rayfin.actors.errors import NumericalError, RequestFailed
from rayfin.actors.messages import NO_TOKEN, Int32Array, Logprobs, SchedulerInfo
from rayfin.actors.runner.sampling.logits_processors import LogitsProcessors
from rayfin.actors.runner.sampling.logprobs import logprobs_of, sampled_logprobs, scored_chunks
from rayfin.actors.runner.sampling.token_rules import RowTokenRules
from rayfin.actors.runner.step.batch import StepInputs
from rayfin.actors.runner.step.request_slots import NO_LOGPROBS, RequestSlots
from rayfin.kernels.sampling.sample import NOTHING, find_bad_rows
from rayfin.kernels.sampling.select import Sample

NO_TOKEN_LEFT = "no token is left that allowed_token_ids, bad_words and min_tokens let through"
NOT_FINITE = "the model's logits are not finite"


@dataclass(slots=True)
class Sampled:
    """What one forward gave; rows are those of its step."""

    tokens: Int32Array  # [R], NO_TOKEN where nothing was sampled
    errors: dict[int, RequestFailed] = field(default_factory=dict)  # by row
    logprobs: Logprobs | None = None  # ``at`` is a row
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by row


class Sampler:
    """Samples for the requests in ``slots``, which it only reads."""

    def __init__(self, slots: RequestSlots, device: torch.device, sample: Sample) -> None:
        self._slots = slots
        self._sample = sample
        self._processors = LogitsProcessors(device)

    def apply_diff(self, info: SchedulerInfo) -> None:
        """Who left and who is new."""
        self._processors.apply_diff(info)

    def row_token_rules(self, info: SchedulerInfo) -> RowTokenRules | None:
        """What changes the rows' logits before they sample, for a lease; None is nothing."""
        return self._processors.row_token_rules(info.ids, info.num_steps)

    def replayed(
        self, info: SchedulerInfo, tokens: Int32Array, logprobs: Logprobs | None
    ) -> Sampled:
        """What a CUDA graph has sampled: [R], negative where the logits were not finite."""
        bad = np.flatnonzero(tokens < 0).tolist()
        self._processors.remember(info.ids, tokens)
        return Sampled(tokens, {row: NumericalError(NOT_FINITE) for row in bad}, logprobs)

    def wanted(self, info: SchedulerInfo, inputs: StepInputs) -> torch.Tensor:
        """Tokens [S + P] of the step whose logits are needed: the S sampled ones, then P scored."""
        if not (chunks := scored_chunks(info, self._slots)):
            return inputs.sampled
        index = np.concatenate([chunk.index for chunk in chunks])
        return torch.cat([inputs.sampled, torch.from_numpy(index).to(inputs.sampled)])

    def sample(self, info: SchedulerInfo, inputs: StepInputs, logits: torch.Tensor) -> Sampled:
        """Tokens from the logits [S + P, V] of the ``wanted`` ones."""
        rows = inputs.sampled_rows
        result = Sampled(np.full(len(info.ids), NO_TOKEN, np.int32))
        self._score(info, logits[len(rows) :], result)
        if not len(rows):
            return result
        raw = logits[: len(rows)]
        slots = info.ids[rows]
        position = (info.kv_len + info.chunk_len)[rows]
        processed = self._processors.process(raw, slots, position)
        tokens = self._sample(processed, inputs.sampling).cpu().numpy().astype(np.int32)
        unsampled = tokens == NOTHING
        bad = unsampled if processed is raw else find_bad_rows(raw).cpu().numpy()
        empty = unsampled & ~bad
        result.errors = {row: RequestFailed(NO_TOKEN_LEFT) for row in rows[empty].tolist()}
        tokens[unsampled | bad] = NO_TOKEN
        result.tokens[rows] = tokens
        result.errors |= {row: NumericalError(NOT_FINITE) for row in rows[bad].tolist()}
        asked = self._slots.logprobs[slots]
        if (most := int(asked.max())) != NO_LOGPROBS:
            asking = asked != NO_LOGPROBS
            result.logprobs = sampled_logprobs(raw, tokens, asking, rows, most)
        self._processors.remember(slots, tokens)
        return result

    def _score(self, info: SchedulerInfo, logits: torch.Tensor, result: Sampled) -> None:
        start = 0
        for chunk in scored_chunks(info, self._slots) if len(logits) else []:
            own = logits[start : start + len(chunk.index)]
            start += len(chunk.index)
            result.prompt_logprobs[chunk.row] = logprobs_of(
                own, chunk.targets, chunk.positions, chunk.k
            )

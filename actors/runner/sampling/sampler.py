"""From a step's logits to its tokens: processors, sampling, log probabilities, bad rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rayfin.actors.errors import NumericalError, RequestFailed
from rayfin.actors.messages import (
    NO_TOKEN,
    BoolArray,
    GrammarUsage,
    Int32Array,
    Int64Array,
    Logprobs,
    SchedulerInfo,
    StepResult,
)
from rayfin.actors.runner.sampling.logprobs import (
    logprobs_of,
    of_named_tokens,
    sampled_logprobs,
    scored_chunks,
)
from rayfin.actors.runner.sampling.processors.base import ProcessorFactory, TokenMasker
from rayfin.actors.runner.sampling.processors.chain import ProcessorChain
from rayfin.actors.runner.sampling.processors.device_rules import RowTokenRules
from rayfin.actors.runner.step.batch import SampledRows, StepInputs
from rayfin.actors.runner.step.request_slots import NO_LOGPROBS, RequestSlots
from rayfin.kernels.sampling.sample import NOTHING, find_bad_rows
from rayfin.kernels.sampling.select import SampleTokens

NO_TOKEN_LEFT = (
    "no token is left that the grammar, allowed_token_ids, bad_words and min_tokens let through"
)
NOT_FINITE = "the model's logits are not finite"


@dataclass(slots=True)
class Sampled:
    """What one forward gave; rows are those of its step."""

    tokens: Int32Array  # [R], NO_TOKEN where nothing was sampled
    errors: dict[int, RequestFailed] = field(default_factory=dict)  # by row
    logprobs: Logprobs | None = None  # ``at`` is a row
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by row


class StepOutput:
    """Collects what the forwards of a call sample into its StepResult."""

    def __init__(self, info: SchedulerInfo) -> None:
        drafting = info.chunk_len[: info.decoding_batch] if info.num_drafts else 1
        self._width = max(info.num_steps, int(np.max(drafting)))
        tokens = np.full((len(info.ids), self._width), NO_TOKEN, np.int32)
        self.result = StepResult(info.epoch, info.step, tokens)
        self._drafting = bool(info.num_drafts)
        self._logprobs: list[Logprobs] = []

    def add(self, rows: Int64Array, column: int, sampled: Sampled) -> None:
        """``sampled`` is what the call's ``rows`` [R] gave as their token number ``column``."""
        result = self.result
        result.tokens[rows, column] = sampled.tokens
        result.errors |= {int(rows[row]): error for row, error in sampled.errors.items()}
        for row, scores in sampled.prompt_logprobs.items():
            result.prompt_logprobs[int(rows[row])] = scores
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs.renumbered(rows * self._width + column))
        if not self._drafting:
            result.num_steps = max(result.num_steps, column + 1)

    def finish(self) -> StepResult:
        if self._logprobs:
            self.result.logprobs = Logprobs.joined(self._logprobs)
        return self.result


class Sampler:
    """Samples for the requests in ``slots``, which it only reads."""

    def __init__(
        self,
        slots: RequestSlots,
        device: torch.device,
        sample: SampleTokens,
        processors: Sequence[ProcessorFactory] = (),
        masker: TokenMasker | None = None,
    ) -> None:
        self._slots = slots
        self._sample = sample
        self._processors = ProcessorChain(device, processors, masker)

    def apply_diff(self, info: SchedulerInfo) -> None:
        """Drops the step's finished requests and starts its new ones."""
        self._processors.apply_diff(info)

    def take_usage(self) -> GrammarUsage | None:
        """What was done with grammars since the last call, or None if it is nothing."""
        return self._processors.take_usage()

    def needs_host(self, info: SchedulerInfo) -> BoolArray:
        """[R] which rows have a logits processor that CUDA graphs cannot run."""
        return self._processors.needs_host(info.ids)

    def row_token_rules(self, info: SchedulerInfo) -> RowTokenRules | None:
        """The rules on the rows' logits for a CUDA graph, or None if no row has any."""
        return self._processors.row_token_rules(info.ids, info.num_steps)

    def replayed(
        self, info: SchedulerInfo, tokens: Int32Array, logprobs: Logprobs | None
    ) -> Sampled:
        """What a CUDA graph has sampled: [R], negative where the logits were not finite."""
        bad = np.flatnonzero(tokens < 0).tolist()
        self._processors.accept(info.ids, tokens)
        return Sampled(tokens, {row: NumericalError(NOT_FINITE) for row in bad}, logprobs)

    def add_scored(self, info: SchedulerInfo, inputs: StepInputs) -> None:
        """Asks the forward for the logits of P prompt tokens to score, behind the sampled ones."""
        if chunks := scored_chunks(info, self._slots):
            index = np.concatenate([chunk.index for chunk in chunks])
            scored = torch.from_numpy(index).to(inputs.sampled)
            inputs.sampled = torch.cat([inputs.sampled, scored])

    def sample(self, info: SchedulerInfo, at: SampledRows, logits: torch.Tensor) -> Sampled:
        """Tokens from the logits [S + P, V]: S sampled rows, then P scored tokens."""
        result = Sampled(np.full(len(info.ids), NO_TOKEN, np.int32))
        self._score(info, logits[len(at.rows) :], result)
        if len(at.rows):
            self._draw(at, logits[: len(at.rows)], result)
        return result

    def warm_up(self, at: SampledRows, logits: torch.Tensor) -> None:
        """Samples from logits [S, V] and keeps nothing."""
        self._sample(logits, at.settings, None)

    def rollback(self, info: SchedulerInfo, tokens: Int32Array) -> None:
        """Takes back the tokens [R] of the last ``sample``: its step is computed again."""
        self._processors.rollback(info.ids, tokens)

    def _draw(self, at: SampledRows, raw: torch.Tensor, result: Sampled) -> None:
        rows, slots = at.rows, at.slots
        masks = self._processors.masks(slots, at.positions, raw.shape[1])
        processed = self._processors.process(raw, slots, at.positions)
        allowed = None if masks is None else masks.allowed
        tokens = self._sample(processed, at.settings, allowed).cpu().numpy().astype(np.int32)
        unsampled = tokens == NOTHING
        bad = unsampled if processed is raw else find_bad_rows(raw).cpu().numpy()
        empty = unsampled & ~bad
        result.errors = {row: RequestFailed(NO_TOKEN_LEFT) for row in rows[empty].tolist()}
        tokens[unsampled | bad] = NO_TOKEN
        result.tokens[rows] = tokens
        result.errors |= {row: NumericalError(NOT_FINITE) for row in rows[bad].tolist()}
        if masks is not None:
            result.errors |= {int(rows[index]): error for index, error in masks.errors.items()}
        asked = self._slots.logprobs[slots]
        if (most := int(asked.max())) != NO_LOGPROBS:
            asking = asked != NO_LOGPROBS
            result.logprobs = sampled_logprobs(raw, tokens, asking, rows, most)
            if self._slots.logprob_ids and result.logprobs is not None:
                named = [self._slots.logprob_ids.get(slot, ()) for slot in slots.tolist()]
                result.logprobs = of_named_tokens(raw, result.logprobs, rows, named)
        self._processors.accept(slots, tokens)

    def _score(self, info: SchedulerInfo, logits: torch.Tensor, result: Sampled) -> None:
        start = 0
        for chunk in scored_chunks(info, self._slots) if len(logits) else []:
            scores = logits[start : start + len(chunk.index)]
            start += len(chunk.index)
            result.prompt_logprobs[chunk.row] = logprobs_of(
                scores, chunk.targets, chunk.positions, chunk.k
            )

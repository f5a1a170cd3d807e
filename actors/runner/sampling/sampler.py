"""From a step's logits to its tokens: processors, sampling, log probabilities, bad rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from rayfin.actors.errors import NoTokenLeft, NumericalError, RequestFailed
from rayfin.actors.messages import (
    NO_TOKEN,
    BoolArray,
    Float32Array,
    Int32Array,
    Int64Array,
    Logprobs,
    NewRequest,
    Sampling,
    SchedulerInfo,
    StepResult,
)
from rayfin.actors.parts import PartUsage
from rayfin.actors.runner.batch import SampledRows, StepInputs
from rayfin.actors.runner.request_slots import NO_LOGPROBS, RequestSlots
from rayfin.actors.runner.sampling.device_rules import RowTokenRules
from rayfin.actors.runner.sampling.logprobs import (
    logprobs_of,
    of_named_tokens,
    sampled_logprobs,
    scored_chunks,
)
from rayfin.actors.runner.sampling.processor import ProcessorFactory
from rayfin.actors.runner.sampling.processor_chain import ProcessorChain
from rayfin.kernels.sampling.filters import allow_bits, apply_temperature
from rayfin.kernels.sampling.sample import NOTHING, filtered, find_bad_rows
from rayfin.kernels.sampling.select import SampleTokens

NO_TOKEN_LEFT = (
    "no token is left that the grammar, allowed_token_ids, bad_words and min_tokens let through"
)
DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Fields of ``Sampling`` that change neither logits nor what is returned."""
NOT_FINITE = "the model's logits are not finite"


@dataclass(slots=True)
class Sampled:
    """What one forward gave; rows are those of its step."""

    tokens: Int32Array  # [R], NO_TOKEN where nothing was sampled
    errors: dict[int, RequestFailed] = field(default_factory=dict)  # by row
    logprobs: Logprobs | None = None  # ``at`` is a row
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by row
    vectors: dict[int, Float32Array] = field(default_factory=dict)  # by row; see StepResult


class StepSampler(Protocol):
    """What makes the results of a step's forwards: a ``Sampler``, or a ``Pooler``."""

    def apply_diff(self, info: SchedulerInfo) -> None: ...

    def take_usage(self) -> PartUsage | None: ...

    def needs_host(self, info: SchedulerInfo) -> BoolArray: ...

    def row_token_rules(self, info: SchedulerInfo) -> RowTokenRules | None: ...

    def replayed(
        self, info: SchedulerInfo, tokens: Int32Array, logprobs: Logprobs | None
    ) -> Sampled: ...

    def add_scored(self, info: SchedulerInfo, inputs: StepInputs) -> None: ...

    def sample(self, info: SchedulerInfo, at: SampledRows, logits: torch.Tensor) -> Sampled: ...

    def rollback(self, info: SchedulerInfo, tokens: Int32Array) -> None: ...


class StepOutput:
    """Collects what the forwards of a call sample into its StepResult."""

    def __init__(self, info: SchedulerInfo) -> None:
        width = info.num_steps if info.grants is None else max(int(info.grants.max()), 1)
        self._width = width
        tokens = np.full((len(info.ids), width), NO_TOKEN, np.int32)
        self.result = StepResult(info.epoch, info.step, tokens)
        self._counts = np.zeros(len(info.ids), np.int64)  # tokens so far
        self._logprobs: list[Logprobs] = []

    def add(self, rows: Int64Array, number: int, sampled: Sequence[Sampled]) -> None:
        """``sampled`` is what the call's ``rows`` [R] gave in its decode step ``number``.

        Several are a row's tokens one after another, with drafts.
        """
        result = self.result
        result.num_steps = max(result.num_steps, number + 1)
        for one in sampled:
            drawn = one.tokens >= 0
            given = rows if drawn.all() else rows[drawn]
            result.tokens[given, self._counts[given]] = one.tokens[drawn]
            result.errors |= {int(rows[row]): error for row, error in one.errors.items()}
            for row, scores in one.prompt_logprobs.items():
                result.prompt_logprobs[int(rows[row])] = scores
            for row, vector in one.vectors.items():
                result.vectors[int(rows[row])] = vector
            if one.logprobs is not None:
                to = rows * self._width + self._counts[rows]
                self._logprobs.append(one.logprobs.renumbered(to))
            self._counts[given] += 1

    def finish(self) -> StepResult:
        result, width = self.result, self._width
        used = max(int(self._counts.max(initial=0)), 1)
        if self._logprobs:
            result.logprobs = logprobs = Logprobs.joined(self._logprobs)
            logprobs.at = logprobs.at // width * used + logprobs.at % width
        result.tokens = np.ascontiguousarray(result.tokens[:, :used])
        return result


class Sampler:
    """Samples for the requests in ``slots``, which it only reads."""

    def __init__(
        self,
        slots: RequestSlots,
        device: torch.device,
        sample: SampleTokens,
        processors: Sequence[ProcessorFactory] = (),
    ) -> None:
        self._slots = slots
        self._sample = sample
        self._processors = ProcessorChain(device, processors)

    def apply_diff(self, info: SchedulerInfo) -> None:
        """Drops the step's finished requests and starts its new ones."""
        self._processors.apply_diff(info)

    def is_plain(self, slots: Int32Array) -> BoolArray:
        """[R] which rows have neither rules on their tokens nor log probabilities."""
        silent: BoolArray = self._slots.logprobs[slots] == NO_LOGPROBS
        return silent & ~self._processors.has_rules(slots)

    def is_free(self, slots: Int32Array) -> BoolArray:
        """Finds which rows [R] have no rules on their tokens, nor log probabilities after rules."""
        free: BoolArray = ~self._processors.has_rules(slots)
        if self._slots.processed:
            free &= ~np.isin(slots, list(self._slots.processed))
        return free

    def enters_free(self, request: NewRequest) -> bool:
        """Tells whether the row of an entering request has no rules and no other part."""
        sampling = request.sampling
        drawn = {name: getattr(sampling, name) for name in (*DRAWN_BY, "logprobs")}
        return not request.parts and not self._processors.extra and sampling == Sampling(**drawn)

    def draw_plain(self, at: SampledRows, logits: torch.Tensor) -> Int32Array:
        """Tokens [S] of plain rows from logits [S, V]; NO_TOKEN where these are not finite."""
        tokens = self._sample(logits, at.settings, None).astype(np.int32)
        tokens[tokens == NOTHING] = NO_TOKEN
        return tokens

    def take_usage(self) -> PartUsage | None:
        """What was done for features since the last call, or None if it is nothing."""
        return self._processors.take_usage()

    def needs_host(self, info: SchedulerInfo) -> BoolArray:
        """[R] which rows have a logits processor that CUDA graphs cannot run, or want log
        probabilities that these do not compute."""
        needs = self._processors.needs_host(info.ids)
        if self._slots.processed:
            needs = needs | np.isin(info.ids, list(self._slots.processed))
        return needs

    def row_token_rules(self, info: SchedulerInfo) -> RowTokenRules | None:
        """The rules on the rows' logits for a CUDA graph, or None if no row has any."""
        return self._processors.row_token_rules(info.ids, info.num_steps)

    def replayed(
        self, info: SchedulerInfo, tokens: Int32Array, logprobs: Logprobs | None
    ) -> Sampled:
        """What a CUDA graph has sampled: [R], negative where nothing can be.

        Rows whose prompts go on sample nothing.
        """
        samples = info.last_pos >= 0
        tokens = np.where(samples, tokens, np.int32(NO_TOKEN))
        errors: dict[int, RequestFailed] = {}
        for row in np.flatnonzero(samples & (tokens < 0)).tolist():
            position = int(info.kv_len[row] + info.chunk_len[row])
            empty = self._processors.leaves_none(int(info.ids[row]), position)
            errors[row] = NoTokenLeft(NO_TOKEN_LEFT) if empty else NumericalError(NOT_FINITE)
        self._processors.accept(info.ids, tokens)
        return Sampled(tokens, errors, logprobs)

    def add_scored(self, info: SchedulerInfo, inputs: StepInputs) -> None:
        """Asks the forward for the logits of P prompt tokens to score, behind the sampled ones."""
        if self._slots.scored and (chunks := scored_chunks(info, self._slots)):
            index = np.concatenate([chunk.index for chunk in chunks])
            scored = torch.from_numpy(index).to(inputs.sampled)
            inputs.sampled = torch.cat([inputs.sampled, scored])

    def sample(self, info: SchedulerInfo, at: SampledRows, logits: torch.Tensor) -> Sampled:
        """Tokens from the logits [S + P, V]: S sampled rows, then P scored tokens."""
        result, sampled = Sampled(np.full(len(info.ids), NO_TOKEN, np.int32)), len(at.rows)
        if sampled < logits.shape[0]:
            self._score(info, logits[sampled:], result)
            logits = logits[:sampled]
        if sampled:
            self._draw(at, logits, result)
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
        tokens = self._sample(processed, at.settings, allowed).astype(np.int32)
        unsampled = tokens == NOTHING
        if processed is not raw or np.count_nonzero(unsampled):
            bad = unsampled if processed is raw else find_bad_rows(raw).cpu().numpy()
            empty = unsampled & ~bad
            tokens[unsampled | bad] = NO_TOKEN
            result.errors = {
                row: self._processors.failure(slot) or NoTokenLeft(NO_TOKEN_LEFT)
                for row, slot in zip(rows[empty].tolist(), slots[empty].tolist(), strict=True)
            }
            result.errors |= {row: NumericalError(NOT_FINITE) for row in rows[bad].tolist()}
        result.tokens[rows] = tokens
        if masks is not None:
            result.errors |= {int(rows[index]): error for index, error in masks.errors.items()}
        if self._slots.asking:
            shown, mass = raw, None
            if self._slots.processed:
                drawn_from = processed if allowed is None else allow_bits(processed, allowed)
                shown, mass = self._with_processed(at, raw, drawn_from)
            result.logprobs = scores = self._logprobs(at, shown, tokens)
            if scores is not None and mass is not None:
                scores.kept_mass = mass[np.searchsorted(rows, scores.at)]
        self._processors.accept(slots, tokens)

    def _with_processed(
        self, at: SampledRows, raw: torch.Tensor, drawn_from: torch.Tensor
    ) -> tuple[torch.Tensor, Float32Array | None]:
        """The raw logits [S, V], but what tokens are drawn from in the rows that ask for that.

        With the mass [S] that filters left of these, NaN of the others; None if no row asks.
        """
        asked = torch.from_numpy(np.isin(at.slots, list(self._slots.processed))).to(raw.device)
        if not bool(asked.any()):
            return raw, None
        left = filtered(drawn_from, at.settings)
        whole = apply_temperature(drawn_from, at.settings.temperature).logsumexp(-1)
        mass = (left.logsumexp(-1) - whole).exp().where(asked, torch.nan)
        shown = torch.where(asked.unsqueeze(1), left, raw.float())
        return shown, mass.cpu().numpy()

    def _logprobs(self, at: SampledRows, raw: torch.Tensor, tokens: Int32Array) -> Logprobs | None:
        """Those of the rows that ask for any."""
        asked = self._slots.logprobs[at.slots]
        if (k := int(asked.max())) == NO_LOGPROBS:
            return None
        scores = sampled_logprobs(raw, tokens, asked != NO_LOGPROBS, at.rows, k)
        if scores is None or not self._slots.logprob_ids:
            return scores
        named = [self._slots.logprob_ids.get(slot, ()) for slot in at.slots.tolist()]
        return of_named_tokens(raw, scores, at.rows, named)

    def _score(self, info: SchedulerInfo, logits: torch.Tensor, result: Sampled) -> None:
        start = 0
        for chunk in scored_chunks(info, self._slots):
            scores = logits[start : start + len(chunk.index)]
            start += len(chunk.index)
            logprobs = logprobs_of(scores, chunk.targets, chunk.positions, chunk.k)
            if chunk.named:
                logprobs = of_named_tokens(scores, logprobs, chunk.positions, chunk.named)
            result.prompt_logprobs[chunk.row] = logprobs

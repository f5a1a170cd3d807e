"""The outputs of ``LLM``, under vLLM's names, and how an engine's tokens become them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import EngineRequest, Float32Array, TokenDelta, TokenLogprob
from rayfin.actors.sampling_params import WHOLE_VOCABULARY, SamplingParams
from rayfin.actors.weights.spans import as_json
from rayfin.deployments.generation.best_of import Likelihood, likeliest
from rayfin.deployments.generation.choice import Choice, ParsedAnswer, name_cause
from rayfin.deployments.generation.plan import NO_PLAN, OutputPlan
from rayfin.deployments.offline.lora import LoRARequest
from rayfin.deployments.text.logprobs import (
    Logprob,
    by_token,
    given_scores,
    kept_masses,
    of_prompt,
    sampling_mask,
    total,
)
from rayfin.deployments.text.output import OutputText, TextDelta
from rayfin.deployments.text.tokenizer import Tokenizer


@dataclass(slots=True)
class SamplingMask:
    """The tokens that each token was drawn from; the name is vLLM's."""

    token_ids: list[list[int] | None]  # None where more than 64 tie for the last place of top_k


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str = ""  # of a chat: the content, without reasoning and tool calls
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "tool_calls", "abort"
    stop_reason: int | str | None = None  # the stop token's id or the stop string
    cumulative_logprob: float | None = None  # of all tokens, if ``logprobs`` are set
    logprobs: list[dict[int, Logprob]] | None = None  # for each token, by token id
    reasoning: str | None = None  # of a chat with a model whose thoughts are known
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI's form
    lora_request: LoRARequest | None = None
    sampling_mask: SamplingMask | None = None  # if ``return_sampling_mask`` is set
    kept_mass: list[float] | None = None  # for each token, if ``logprobs`` are processed
    # Which weights made which tokens, at the end of an ``AsyncLLM``'s output (docs/rollouts.md)
    weight_versions: list[dict[str, Any]] | None = None

    def finished(self) -> bool:
        """Returns whether it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token
    prompt_token_id_logprobs: Float32Array | None = None  # [rows, K] of the ids that were given
    metrics: None = None
    lora_request: LoRARequest | None = None


class OfflineChoice:
    """Builds one output of ``result`` from an engine request's deltas.

    The first choice also sets what ``result`` has of the prompt.
    """

    def __init__(
        self,
        request: EngineRequest,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        result: RequestOutput,
        plan: OutputPlan = NO_PLAN,
    ) -> None:
        self.request = request
        self.output = CompletionOutput(len(result.outputs), lora_request=result.lora_request)
        self._result = result
        self._tokenizer = tokenizer
        self._text: OutputText | None = None
        if tokenizer is not None:
            self._text = OutputText(tokenizer, params, request, plan.parser())
        self._parsed = ParsedAnswer(plan, request.request_id)
        self.likelihood = Likelihood()
        self._top_k = params.top_k
        self._given = params.prompt_logprob_token_ids
        if params.return_sampling_mask:
            self.output.sampling_mask = SamplingMask([])
        named = request.sampling.logprob_ids
        self._num_logprobs = _shown(params, request)
        if params.logprobs is not None or named:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._prompt_logprobs: dict[int, TokenLogprob] = {}  # by position
        scored = (request.sampling.logprobs, request.sampling.prompt_logprobs) != (None, None)
        self.is_read_whole = not (scored or named or params.stop) and plan is NO_PLAN
        """Whether its tokens may come in one delta at its end: none of them ends it before."""

    def name_cause(self, error: RayfinError) -> None:
        """Gives an error that the request's own rules have caused the path of their field."""
        name_cause(error, self.request, self._parsed.plan.param)

    def append(self, delta: TokenDelta) -> bool:
        """Adds a delta. Returns True if that ends the output before the engine's request."""
        output, result = self.output, self._result
        new = _without_text(delta) if self._text is None else self._text.push(delta)
        output.text += new.text
        output.token_ids += new.token_ids
        self._parsed.add(new.events, new.reasoning_tokens)
        output.finish_reason = self._parsed.finish_reason(new.finish_reason)
        output.stop_reason = new.stop_reason
        if output.finish_reason is not None:
            output.reasoning = self._parsed.reasoning or None
            output.tool_calls = [call.as_openai() for call in self._parsed.whole_calls]
        self.likelihood.add(delta, len(new.token_ids))
        self._add_logprobs(new)
        if output.index == 0:
            result.num_cached_tokens = max(result.num_cached_tokens, new.cached_tokens)
        return output.finish_reason is not None and delta.finish_reason is None

    def _add_logprobs(self, new: TextDelta) -> None:
        sampling, output = self.request.sampling, self.output
        if output.logprobs is not None and output.cumulative_logprob is not None:
            output.cumulative_logprob += total(new.logprobs)
            output.logprobs += [
                by_token(token, logprob, self._num_logprobs, self._tokenizer)
                for token, logprob in zip(new.token_ids, new.logprobs, strict=True)
            ]
        if output.sampling_mask is not None:
            output.sampling_mask.token_ids += sampling_mask(new.logprobs, self._top_k)
        if self.request.sampling.processed and new.logprobs:
            output.kept_mass = [*(output.kept_mass or []), *(kept_masses(new.logprobs) or [])]
        self._prompt_logprobs |= new.prompt_logprobs
        if sampling.prompt_logprobs is None or output.finish_reason is None:
            return
        result, scores = self._result, self._prompt_logprobs
        if self._given is not None:
            ids = result.prompt_token_ids
            result.prompt_token_id_logprobs = given_scores(self._given, scores, len(ids))
        else:
            ids, count = result.prompt_token_ids, sampling.prompt_logprobs
            result.prompt_logprobs = of_prompt(ids, scores, count, self._tokenizer)


def _shown(params: SamplingParams, request: EngineRequest) -> int:
    """Tokens beside each sampled one: for a mask the engine returns more."""
    sampling = request.sampling
    asked = sampling.logprobs if params.logprobs == WHOLE_VOCABULARY else params.logprobs
    return len(sampling.logprob_ids) or asked or 0


def _without_text(delta: TokenDelta) -> TextDelta:
    return TextDelta(
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        token_ids=delta.tokens,
        cached_tokens=delta.cached_tokens,
        logprobs=delta.logprobs or [],
        prompt_logprobs=delta.prompt_logprobs,
    )


@dataclass(slots=True)
class PreparedPrompt:
    """A prompt whose requests are built: its output so far, and all choices that run for it."""

    result: RequestOutput
    choices: list[OfflineChoice]
    params: SamplingParams

    def finished(self) -> RequestOutput:
        """Returns the output at the end; ``best_of`` keeps the likeliest choices, best first."""
        wanted = self.params.n
        if len(self.choices) > wanted:
            best = likeliest([choice.likelihood for choice in self.choices], wanted)
            outputs = [replace(self.choices[i].output, index=n) for n, i in enumerate(best)]
            self.result.outputs = outputs
        return self.result


class OutputWriter:
    """The outputs of one request whose choices come as text; each is an object of its own.

    Args:
        prompt: the text to show, and its ids.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer,
        request_id: str,
        prompt: tuple[str | None, list[int]],
        lora_request: LoRARequest | None,
    ) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self.request_id = request_id
        self._prompt, self._ids = prompt
        self._lora = lora_request
        self._logprobs: dict[int, list[dict[int, Logprob]]] = {}  # by key of a choice's request

    def delta(self, choice: Choice, new: TextDelta, finished: bool) -> RequestOutput:
        """Returns what is new of one choice, and whether the request has ended with it."""
        thought = "".join(event.text for event in new.events if event.kind == "reasoning")
        output = self._output(choice, new.text, list(new.token_ids), thought)
        if output.logprobs is not None:
            output.logprobs = self._by_token(choice, new.token_ids, new.logprobs)
        output.sampling_mask = self._mask(new.logprobs)
        output.kept_mass = kept_masses(new.logprobs) if new.logprobs else None
        return self._of([output], [choice], finished)

    def so_far(self, choice: Choice, new: TextDelta, finished: bool) -> RequestOutput:
        """Returns all of one choice up to now, ``new`` included."""
        return self._of([self._whole(choice)], [choice], finished)

    def whole(self, choices: Sequence[Choice]) -> RequestOutput:
        """Returns all choices, which have ended."""
        return self._of([self._whole(choice) for choice in choices], choices, True)

    def _whole(self, choice: Choice) -> CompletionOutput:
        output = self._output(
            choice, "".join(choice.text), list(choice.token_ids), choice.reasoning
        )
        if output.logprobs is not None:
            known = self._logprobs.setdefault(choice.request.key, [])
            place = len(known)
            known += self._by_token(choice, choice.token_ids[place:], choice.logprobs[place:])
            output.logprobs = [*known]
        output.sampling_mask = self._mask(choice.logprobs)
        output.kept_mass = kept_masses(choice.logprobs) if choice.logprobs else None
        return output

    def _mask(self, entries: Sequence[TokenLogprob]) -> SamplingMask | None:
        if not self._params.return_sampling_mask:
            return None
        return SamplingMask(sampling_mask(entries, self._params.top_k))

    def _output(
        self, choice: Choice, text: str, ids: list[int], reasoning: str
    ) -> CompletionOutput:
        scored = self._params.logprobs is not None or bool(choice.request.sampling.logprob_ids)
        ended = choice.finish_reason is not None
        return CompletionOutput(
            choice.index,
            text,
            ids,
            choice.finish_reason,
            choice.last.stop_reason,
            cumulative_logprob=total(choice.logprobs) if scored else None,
            logprobs=[] if scored else None,
            reasoning=reasoning or None,
            tool_calls=[call.as_openai() for call in choice.parsed.whole_calls] if ended else [],
            lora_request=self._lora,
            weight_versions=as_json(choice.output.versions.spans) if ended else None,
        )

    def _by_token(
        self, choice: Choice, ids: Sequence[int], entries: Sequence[TokenLogprob]
    ) -> list[dict[int, Logprob]]:
        count = _shown(self._params, choice.request)
        return [
            by_token(token, entry, count, self._tokenizer)
            for token, entry in zip(ids, entries, strict=True)
        ]

    def _of(
        self, outputs: list[CompletionOutput], choices: Sequence[Choice], finished: bool
    ) -> RequestOutput:
        first = choices[0]
        result = RequestOutput(
            self.request_id,
            self._prompt,
            self._ids,
            outputs,
            finished,
            first.cached_tokens,
            lora_request=self._lora,
        )
        if (asked := self._params.prompt_logprobs) is not None and finished:
            count = sys.maxsize if asked == WHOLE_VOCABULARY else asked
            scores = first.prompt.scores
            result.prompt_logprobs = of_prompt(self._ids, scores, count, self._tokenizer)
        if (given := self._params.prompt_logprob_token_ids) is not None and finished:
            result.prompt_token_id_logprobs = given_scores(
                given, first.prompt.scores, len(self._ids)
            )
        return result

"""The token counts and the times in a reply."""

from dataclasses import dataclass

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0
    created_cache_tokens: int = 0  # computed, and in the prefix cache from now on
    multimodal_tokens: None = None  # vLLM's; prompts are text


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0  # between the marks of a thought


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class RequestMetrics(BaseModel):
    """The times of a request, under vLLM's names; null where a time is not known."""

    time_to_first_token_ms: float | None = None  # from the admission on
    generation_time_ms: float | None = None  # from the first token to the last
    queue_time_ms: float | None = None  # from the arrival at the engine to the admission
    mean_itl_ms: float | None = None  # between tokens, from two tokens on
    tokens_per_second: float | None = None  # all tokens, from the admission to the last
    speculative_decoding: None = None


@dataclass(slots=True)
class RequestTimes:
    """When the tokens of one choice came.

    The engine measures the time to the first token, the ingress the time from there on: durations
    of two clocks are added, never times.
    """

    queued: float = 0.0  # seconds from the arrival at the engine to the admission ...
    first_token: float | None = None  # ... and to the first token
    first: float | None = None  # seconds of the ingress' clock
    last: float = 0.0

    def observe(self, queued: float, first_token: float | None, now: float) -> None:
        """Records a delta with tokens that arrived at ``now``."""
        if self.first_token is None and first_token is not None:
            self.queued, self.first_token = queued, first_token
        self.first = now if self.first is None else self.first
        self.last = now

    def metrics(self, tokens: int) -> RequestMetrics:
        """Returns the times of a request of so many tokens."""
        if self.first is None:
            return RequestMetrics()
        decode = self.last - self.first
        metrics = RequestMetrics(generation_time_ms=decode * 1e3)
        if tokens > 1:
            metrics.mean_itl_ms = decode / (tokens - 1) * 1e3
        if self.first_token is not None:
            prefill = self.first_token - self.queued
            metrics.queue_time_ms = self.queued * 1e3
            metrics.time_to_first_token_ms = prefill * 1e3
            if prefill + decode > 0:
                metrics.tokens_per_second = tokens / (prefill + decode)
        return metrics

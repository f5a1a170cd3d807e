"""What ``LLM`` returns; the names are vLLM's."""

from dataclasses import dataclass, field

from rayfin.deployments.text.logprobs import Logprob


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "abort"
    stop_reason: int | str | None = None  # the stop token's id or the stop string
    cumulative_logprob: float | None = None  # of all tokens, where ``logprobs`` were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # for each token, by token id


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
    metrics: None = None

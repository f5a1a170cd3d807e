"""A prompt of an HTTP request, and the choices that answer it."""

from dataclasses import dataclass, field, replace

from rayfin.actors.messages import EngineRequest, TokenDelta, TokenLogprob
from rayfin.deployments.requests.best_of import Likelihood
from rayfin.deployments.text.output import OutputText, TextDelta


@dataclass(slots=True)
class Prompt:
    """One prompt and the name that the client knows it by."""

    ids: list[int]
    param: str
    echo: str = ""  # the text that its choices start with
    cache_salt: str | None = None  # its pages are shared with prompts of the same one
    scores: dict[int, TokenLogprob] = field(default_factory=dict)  # by position, where asked for


@dataclass(slots=True)
class Choice:
    """One choice: an engine request and its text so far."""

    index: int  # in the answer
    prompt: Prompt
    request: EngineRequest
    output: OutputText
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: TextDelta = field(default_factory=TextDelta)
    cached_tokens: int = 0
    likelihood: Likelihood = field(default_factory=Likelihood)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # with them
    silent: bool = False  # only the prompt is wanted of it
    earlier: list[TokenDelta] = field(default_factory=list)  # of a stream that it goes on from

    def append(self, delta: TextDelta) -> None:
        """Adds ``delta``, which loses its tokens here where the choice is silent."""
        if self.silent:
            delta.text, delta.token_ids, delta.logprobs, delta.stop_reason = "", [], [], None
            delta.offsets = []
            delta.finish_reason = delta.finish_reason and "length"
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.prompt.scores |= delta.prompt_logprobs
        self.last = delta
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)

    def score_prompt(self, like: "Choice") -> None:
        """Asks for the prompt's log probabilities, as the first choice does."""
        asked = like.request.sampling.prompt_logprobs
        self.request.sampling = replace(self.request.sampling, prompt_logprobs=asked)

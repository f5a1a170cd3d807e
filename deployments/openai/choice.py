"""A prompt of an HTTP request, and the choices that answer it."""

from dataclasses import dataclass, field

from rayfin.actors.messages import EngineRequest
from rayfin.deployments.best_of import Likelihood
from rayfin.deployments.text.output import OutputText, TextDelta


@dataclass(slots=True)
class Prompt:
    """One prompt and the name that the client knows it by."""

    ids: list[int]
    param: str
    echo: str = ""  # the text that its choices start with


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

    def take(self, delta: TextDelta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.last = delta
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)

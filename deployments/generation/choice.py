"""A prompt of an HTTP request, and the choices that answer it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfin.actors.errors import NoTokenLeft, RayfinError
from rayfin.actors.guidance import Guidance
from rayfin.actors.media.part import MediaInput, PromptEmbeds
from rayfin.actors.messages import EngineRequest, TokenDelta, TokenLogprob
from rayfin.deployments.generation.best_of import Likelihood
from rayfin.deployments.generation.plan import NO_PLAN, OutputPlan
from rayfin.deployments.generation.usage import RequestTimes
from rayfin.deployments.telemetry.ingress_counters import IngressCounters
from rayfin.deployments.text.call_ids import make_call_id
from rayfin.deployments.text.generation_prompt import ChatPrompt
from rayfin.deployments.text.output import OutputText, TextDelta
from rayfin.deployments.text.parsing.events import Event


@dataclass(slots=True)
class Prompt:
    """One prompt, and the name of its field in errors."""

    ids: list[int]
    param: str
    echo: str = ""  # the text that its choices start with
    cache_salt: str | None = None  # pages are shared only among prompts with the same salt
    images: tuple[MediaInput, ...] = ()
    embeds: tuple[PromptEmbeds, ...] = ()  # in place of tokens, whose ids are zeros
    repairs: tuple[str, ...] = ()  # what of its messages was changed for the template
    scores: dict[int, TokenLogprob] = field(default_factory=dict)  # by position, if requested

    @classmethod
    def of(cls, chat: ChatPrompt, param: str, cache_salt: str | None = None) -> "Prompt":
        """Returns a rendered conversation as a prompt without embeddings."""
        return cls(chat.ids, param, cache_salt=cache_salt, images=chat.images, repairs=chat.repairs)

    @property
    def shown_ids(self) -> list[int] | None:
        """The ids as answers have them; embeddings have none."""
        return None if self.embeds else self.ids


def written_tokens(prompt: int, cached: int, page_size: int) -> int:
    """Tokens of a prompt that were not in the prefix cache and fill pages of it."""
    return max(0, prompt // page_size * page_size - cached) if page_size else 0


@dataclass(slots=True)
class AnswerCall:
    """One tool call."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)  # of the arguments' JSON text
    finished: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    def as_openai(self) -> dict[str, Any]:
        """Returns the call as it stands in a chat message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ParsedAnswer:
    """What the events of one answer add up to, besides its content."""

    def __init__(self, plan: OutputPlan = NO_PLAN, request_id: str = "") -> None:
        self.plan = plan
        self._request_id = request_id
        self._reasoning: list[str] = []
        self.calls: list[AnswerCall] = []  # by index; the last one may be unfinished
        self.reasoning_tokens = 0

    def add(self, events: Sequence[Event], reasoning_tokens: int) -> None:
        """Adds what a delta has brought."""
        self.reasoning_tokens += reasoning_tokens
        for event in events:
            if event.kind == "reasoning":
                self._reasoning.append(event.text)
            elif event.kind == "call":
                self.calls.append(AnswerCall(self._id(event), event.name))
            elif event.kind == "arguments":
                self.calls[event.index].pieces.append(event.text)
            elif event.kind == "call_end":
                self.calls[event.index].finished = True

    def _id(self, event: Event) -> str:
        """Returns the same whenever the same request is answered or resumed."""
        seed = f"{self._request_id}:{event.index}"  # the engine's id has the choice's number
        number = self.plan.earlier_calls + event.index
        return make_call_id(self.plan.id_style, seed, event.name, number)

    @property
    def whole_calls(self) -> list[AnswerCall]:
        """The finished calls. One that was cut is left out: half a JSON text helps no one."""
        return [call for call in self.calls if call.finished]

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def count(self, counts: IngressCounters, unparsed: int) -> None:
        """Counts the whole answer; ``unparsed`` calls of it became content."""
        choice, guidance = self.plan.choice, self.plan.guidance
        whole = len(self.whole_calls)
        if whole:
            named = "named" if choice.name is not None else "required"
            counts.tool_calls[named if choice.forced else "auto"] += whole
        counts.tool_calls_unparsed += unparsed
        counts.tool_calls_cut += len(self.calls) - whole
        counts.reasoning_tokens += self.reasoning_tokens
        budget = guidance.thinking.budget if guidance and guidance.thinking else None
        if budget is not None and self.reasoning_tokens >= budget:
            counts.thinking_budgets_spent += 1

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns OpenAI's reason: ``tool_calls`` if the answer stopped and holds calls.

        An answer that had to call one named function stops, and a cut one keeps its reason.
        """
        named = self.plan.choice.name is not None
        return "tool_calls" if reason == "stop" and self.whole_calls and not named else reason

    def content(self, text: str) -> str | None:
        """Returns a message's content for its ``text``; None if there are other parts only."""
        if text or self.plan.choice.forced:
            return text
        return None if self.whole_calls or self._reasoning else ""


@dataclass(slots=True)
class Choice:
    """One choice: an engine request and its text so far."""

    index: int  # in the answer
    prompt: Prompt
    request: EngineRequest
    output: OutputText
    parsed: ParsedAnswer = field(default_factory=ParsedAnswer)
    text: list[str] = field(default_factory=list)  # the content, if the answer is parsed
    token_ids: list[int] = field(default_factory=list)
    last: TextDelta = field(default_factory=TextDelta)
    cached_tokens: int = 0  # of the prompt: found in the prefix cache
    page_size: int = 0  # tokens that the prefix cache takes at once; 0: there is none
    likelihood: Likelihood = field(default_factory=Likelihood)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # with them
    silent: bool = False  # the client wants the prompt only
    times: RequestTimes | None = None  # if replies have them
    earlier: list[TokenDelta] = field(default_factory=list)  # of the stream that this one resumes

    def append(self, delta: TextDelta) -> None:
        """Adds ``delta``; removes its tokens if the choice is silent."""
        if self.silent:
            delta.text, delta.token_ids, delta.logprobs, delta.stop_reason = "", [], [], None
            delta.offsets = []
            delta.finish_reason = delta.finish_reason and "length"
        self.text.append(delta.text)
        self.parsed.add(delta.events, delta.reasoning_tokens)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.prompt.scores |= delta.prompt_logprobs
        self.last = delta
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)

    @property
    def whole(self) -> TextDelta:
        """All deltas as one, without the parts of a parsed answer."""
        return replace(
            self.last,
            text="".join(self.text),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            offsets=self.offsets,
        )

    @property
    def calls(self) -> list[AnswerCall]:
        """The tool calls so far; the last one may be unfinished."""
        return self.parsed.calls

    @property
    def reasoning(self) -> str:
        return self.parsed.reasoning

    @property
    def reasoning_tokens(self) -> int:
        return self.parsed.reasoning_tokens

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's reason for the end; None before it."""
        return self.parsed.finish_reason(self.last.finish_reason)

    @property
    def content(self) -> str | None:
        """A message's content; None where there are only calls or reasoning."""
        return self.parsed.content("".join(self.text))

    @property
    def written_tokens(self) -> int:
        """Tokens of the prompt that were computed for the prefix cache: those of whole pages."""
        return written_tokens(len(self.prompt.ids), self.cached_tokens, self.page_size)

    def name_cause(self, error: RayfinError) -> None:
        """Gives an error that the request's own rules have caused the path of their field."""
        name_cause(error, self.request, self.parsed.plan.param)

    def score_prompt(self, like: "Choice") -> None:
        """Requests the prompt's log probabilities, as the first choice does."""
        asked = like.request.sampling.prompt_logprobs
        self.request.sampling = replace(self.request.sampling, prompt_logprobs=asked)


def name_cause(error: RayfinError, request: EngineRequest, grammar_param: str) -> None:
    """Gives an error that a request's own rules have caused the path of their field.

    Args:
        grammar_param: the path of the grammar; "" if there is none.
    """
    caused = isinstance(error, NoTokenLeft) or error.code == "grammar_failed"
    if not caused or error.param is not None:
        return
    sampling = request.sampling
    fields = {
        grammar_param: request.part(Guidance) is not None,
        "allowed_token_ids": bool(sampling.allowed),
        "bad_words": bool(sampling.bad_words),
        "min_tokens": bool(sampling.banned_until),
    }
    error.param = next((name for name, is_set in fields.items() if name and is_set), None)

"""Request bodies. Types are strict: "5" is not a number, true is not an integer, 1 is a float.

``SamplingParams`` checks ranges and names the field. Unknown fields are accepted and reported.
"""

from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.generation.bodies import GenerationBody, unserved
from rayfin.deployments.requests.prompts import WrittenPrompt, read_prompts
from rayfin.deployments.text.checks import missing

MAX_PROMPTS = 128
COMPLETION_TOKENS = 16  # of /v1/completions where a request names no limit


class CompletionRequest(GenerationBody):
    prompt: Any = None

    logprobs: int | None = None  # number of top tokens per token

    @property
    def scores_only(self) -> bool:
        """Whether the client wants the prompt only."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[WrittenPrompt]:
        """The prompts, each a text or token ids, none empty.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong, such as prompt[1].
        """
        if self.prompt is None:
            raise missing("prompt")
        return read_prompts(self.prompt, most=MAX_PROMPTS)

    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    def prompt_logprobs_wanted(self) -> int | None:
        """An echoed prompt has the same log probabilities as the answer."""
        asked = self.prompt_logprobs
        return self.logprobs if asked is None and self.echo else asked

    def token_limit(self) -> int:
        if self.scores_only:
            return 1  # the least of an engine request; it is not shown
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class ChatCompletionRequest(GenerationBody):
    messages: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None  # number of top tokens per token
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None  # reasoning is not separated
    return_prompt_text: bool | None = None

    def token_limit(self) -> int | None:
        """Returns the limit under either name; None fills the context."""
        names = (self.max_completion_tokens, self.max_tokens)
        if None not in names and names[0] != names[1]:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; set one of them.", "max_tokens"
            )
        return names[1] if names[0] is None else names[0]

    def logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.messages is None:
            raise missing("messages")
        if self.tool_choice not in (None, "none", "auto"):
            if self.tool_choice == "required" or isinstance(self.tool_choice, dict):
                raise unserved("tool_choice", "other than none and auto ")
            raise InvalidRequest("tool_choice must be none or auto.", "tool_choice")
        if self.tool_choice == "auto" and not self.tools:
            raise InvalidRequest("tool_choice auto needs tools.", "tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")

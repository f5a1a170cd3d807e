"""Request bodies. Types are strict: "5" is not a number, true is not an integer, 1 is a float.

``SamplingParams`` checks ranges and names the field. Unknown fields are accepted and reported.
"""

from dataclasses import replace
from typing import Any

from pydantic import PrivateAttr

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.guidance.tool_choice import function_tools, read_tool_choice
from rayfin.deployments.requests.prompts import WrittenPrompt, read_prompts
from rayfin.deployments.text.checks import as_choice, missing

MAX_PROMPTS = 128
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
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
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None  # -1: no limit
    return_prompt_text: bool | None = None
    _rules: AnswerRules | None = PrivateAttr(None)

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

    def answer_rules(self) -> AnswerRules:
        """Returns what the request says of the form of its answers.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong.
        """
        if self._rules is not None:
            return self._rules
        tools = () if self.tools is None else function_tools(self.tools)
        choice = read_tool_choice(self.tool_choice, tools, parallel=self.parallel_tool_calls)
        budget = self.thinking_token_budget
        if budget is not None and budget < -1:
            raise InvalidRequest(
                f"thinking_token_budget must be at least -1, got {budget}.",
                "thinking_token_budget",
                "integer_below_min_value",
            )
        limit = None if budget == -1 else budget
        self._rules = replace(super().answer_rules(), tools=tools, choice=choice, budget=limit)
        return self._rules

    def check(self) -> None:
        super().check()
        if self.messages is None:
            raise missing("messages")
        self.answer_rules()
        if self.reasoning_effort is not None:
            as_choice(self.reasoning_effort, EFFORTS, "reasoning_effort")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")

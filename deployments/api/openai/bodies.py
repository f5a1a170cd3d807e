"""Request bodies. Types are strict: "5" is not a number, true is not an integer, 1 is a float.

``SamplingParams`` checks ranges and names the field. Unknown fields are accepted and reported.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import PrivateAttr

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.generation.limits import MAX_CHOICES
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.generation.prompt_forms import WrittenPrompt, read_prompts
from rayfin.deployments.guidance.tool_choice import ToolChoice, read_tool_choice
from rayfin.deployments.guidance.tools import NO_TOOLS, DeclaredTools, declared_tools
from rayfin.deployments.media.read_embeds import listed
from rayfin.deployments.text.checks import as_choice, as_list, missing
from rayfin.deployments.text.messages import MAX_MESSAGES, has_named_media

GIVEN_PROMPT = "kv_transfer_params.prompt_token_ids"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NO_PROMPT: tuple[tuple[object, str], ...] = (
    (None, "missing_required_parameter"),
    ("", "empty_prompt"),
    ([], "empty_array"),
)
COMPLETION_TOKENS = 16  # of /v1/completions where a request names no limit


class _CompletionBody(GenerationBody):
    """The fields of both kinds of completion that no other API has."""

    logprob_token_ids: list[int] | None = None  # tokens in place of the top ones
    kv_transfer_params: dict[str, Any] | None = None  # nothing is transferred

    def logprob_ids_wanted(self) -> list[int] | None:
        return self.logprob_token_ids or None

    def check(self) -> None:
        super().check()
        if self.logprob_token_ids and self.logprobs_wanted() is None:
            raise InvalidRequest(
                "When using logprob_token_ids, logprobs must be set.", "logprob_token_ids"
            )


class CompletionRequest(_CompletionBody):
    prompt: Any = None
    prompt_embeds: Any = None  # see --enable-prompt-embeds
    logprobs: int | None = None  # number of top tokens per token

    @property
    def scores_only(self) -> bool:
        """Whether the client wants the prompt only."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self, limit: int) -> list[WrittenPrompt]:
        """The prompts, each a text or token ids, none empty; at most so many.

        Beside embeddings there may be none.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong, such as prompt[1].
        """
        for empty, code in NO_PROMPT:
            if self.prompt == empty:
                if self.embeds(limit):
                    return []
                message = "Either prompt or prompt_embeds must be provided and non-empty."
                raise InvalidRequest(message, "prompt", code)
        return read_prompts(self.prompt, max_prompts=limit)

    def embeds(self, limit: int) -> list[tuple[str, str]]:
        """The embeddings that are prompts, each behind its path; at most so many.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong, such as prompt_embeds[1].
        """
        empty = self.prompt_embeds is None or self.prompt_embeds == []
        return [] if empty else listed(self.prompt_embeds, limit)

    def check(self) -> None:
        super().check()
        if self.prompt_embeds and self.echo:
            raise InvalidRequest("echo does not go with prompt_embeds: they are no text.", "echo")
        if self.logprob_token_ids and self.scores_only:
            raise InvalidRequest(
                "logprob_token_ids does not go with echo and max_tokens 0: there is no output.",
                "logprob_token_ids",
            )

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


class ChatCompletionRequest(_CompletionBody):
    messages: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None  # number of top tokens per token
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None  # see --trust-request-chat-template
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None  # for the template
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

    def ignored_fields(self) -> list[str]:
        """Also the ``uuid`` of media: their content names them, for others could have that name."""
        named = ["messages.content.uuid"] if has_named_media(self.messages) else []
        hosted = self.declared_tools.ignored_fields() if self.tools else []
        return super().ignored_fields() + named + hosted

    def conversations(self) -> list[Any]:
        """Returns the conversations, unchecked; the answer has choices for each."""
        return [self.messages]

    def conversation_param(self, number: int) -> str:
        """Returns the path of a conversation, for errors."""
        return "messages"

    def given_prompt(self) -> list[int] | None:
        """Returns the token ids that stand for the messages, or None.

        As in vLLM, another server has rendered the messages to them, and ``echo`` needs the
        messages themselves.

        Raises:
            InvalidRequest: ``param`` is kv_transfer_params.prompt_token_ids.
        """
        ids = (self.kv_transfer_params or {}).get("prompt_token_ids")
        if ids is None or self.echo:
            return None
        if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
            raise InvalidRequest(
                f"{GIVEN_PROMPT} must be a non-empty list of non-negative integers.",
                GIVEN_PROMPT,
                "invalid_type",
            )
        return ids

    @cached_property
    def declared_tools(self) -> DeclaredTools:
        """The checked tools, read once.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong.
        """
        return declared_tools(self.tools) if self.tools else NO_TOOLS

    def answer_rules(self) -> AnswerRules:
        """Returns what the request says of the form of its answers.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong.
        """
        if self._rules is not None:
            return self._rules
        tools = self.declared_tools.functions
        choice = ToolChoice()
        asked = self.tool_choice is not None and not self.declared_tools.left_out
        if tools or asked:
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


class BatchChatRequest(ChatCompletionRequest):
    """vLLM's chat completions of several conversations: one choice for each."""

    def conversations(self) -> list[Any]:
        return list(self.messages)

    def conversation_param(self, number: int) -> str:
        return f"messages[{number}]"

    def given_prompt(self) -> None:
        if (self.kv_transfer_params or {}).get("prompt_token_ids") is not None:
            raise InvalidRequest(f"A batch takes no {GIVEN_PROMPT}.", GIVEN_PROMPT)

    def check(self) -> None:
        """As for one conversation; streams, several choices, searches and tools are refused."""
        super().check()
        for i, messages in enumerate(as_list(self.messages, "messages", MAX_CHOICES)):
            as_list(messages, f"messages[{i}]", MAX_MESSAGES)
        for name, harmless in NOT_IN_A_BATCH.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise InvalidRequest(f"{name} does not go with a batch of conversations.", name)


NOT_IN_A_BATCH: dict[str, tuple[object, ...]] = {  # field -> values that change nothing
    "stream": (False,),
    "n": (1,),
    "use_beam_search": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "prompt_logprobs": (),
    "return_prompt_text": (False,),
}

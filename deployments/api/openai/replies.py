"""Replies. Fields with the default None are left out if unset; the others always appear."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from rayfin.deployments.generation.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from rayfin.deployments.generation.usage import Usage


def _absent(value: object) -> bool:
    return value is None


def _optional() -> Any:
    return Field(default=None, exclude_if=_absent)


class CompletionChoice(BaseModel):
    """A choice of a completion, whole or one chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _optional()
    prompt_token_ids: list[int] | None = _optional()
    prompt_logprobs: PromptLogprobs | None = _optional()


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = _optional()


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    role: str = "assistant"
    content: str | None
    reasoning: str | None = _optional()
    reasoning_content: str | None = _optional()
    tool_calls: list[ToolCall] | None = _optional()


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _optional()


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_text: str | None = _optional()
    prompt_token_ids: list[int] | None = _optional()
    prompt_logprobs: PromptLogprobs | None = _optional()


class FunctionDelta(BaseModel):
    """The name whole in the first one of a call; then pieces of the arguments."""

    name: str | None = _optional()
    arguments: str


class ToolCallDelta(BaseModel):
    index: int
    id: str | None = _optional()
    type: Literal["function"] | None = _optional()
    function: FunctionDelta


class ChatDelta(BaseModel):
    """One kind of part: the role, reasoning, content, or a piece of one call."""

    role: str | None = _optional()
    content: str | None = _optional()
    reasoning: str | None = _optional()
    reasoning_content: str | None = _optional()
    tool_calls: list[ToolCallDelta] | None = _optional()


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _optional()


class ChatChunk(BaseModel):
    """``prompt_text`` and ``prompt_token_ids`` stand in the first one."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = _optional()
    prompt_text: str | None = _optional()
    prompt_token_ids: list[int] | None = _optional()

"""Whole replies, with the keys of vLLM's: those that nothing sets are null.

``reasoning_content`` is left out where it is unset, and ``tool_calls`` where there are none. The
chunks of streams are in chunks.py.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

from rayfin.deployments.generation.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from rayfin.deployments.generation.usage import RequestMetrics, Usage


def _absent(value: object) -> bool:
    return value is None


def _optional() -> Any:
    return Field(default=None, exclude_if=_absent)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: None = None
    weight_versions: list[dict[str, Any]] | None = _optional()


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: None = None
    usage: Usage
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: RequestMetrics | None = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(BaseModel):
    name: str
    input: str


class CustomToolCall(BaseModel):
    id: str
    type: Literal["custom"] = "custom"
    custom: CalledCustom


class ChatMessage(BaseModel):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall | CustomToolCall] | None = _optional()
    reasoning: str | None = None
    reasoning_content: str | None = _optional()


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: None = None
    weight_versions: list[dict[str, Any]] | None = _optional()


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: None = None
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: RequestMetrics | None = None

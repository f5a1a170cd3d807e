"""Replies of Anthropic's API: the message, and the events of its stream."""

from typing import Any, Literal

from pydantic import BaseModel, Field

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(BaseModel):
    thinking_tokens: int


class AnthropicUsage(BaseModel):
    """The first three are all tokens of the prompt."""

    input_tokens: int  # neither read from the cache nor created in it
    cache_creation_input_tokens: int = 0  # computed for it, up to the last mark of cache_control
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = Field(
        default=None, exclude_if=lambda value: value is None
    )  # where the model's reasoning is known


class AnthropicMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicEvent(BaseModel):
    type: Literal["ping", "message_stop"]


class MessageStart(BaseModel):
    type: Literal["message_start"] = "message_start"
    message: AnthropicMessage


class BlockStart(BaseModel):
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ContentBlock


class AnthropicTextDelta(BaseModel):
    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(BaseModel):
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureDelta(BaseModel):
    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputDelta(BaseModel):
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class BlockDelta(BaseModel):
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: AnthropicTextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(BaseModel):
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class Stop(BaseModel):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(BaseModel):
    type: Literal["message_delta"] = "message_delta"
    delta: Stop
    usage: AnthropicUsage


class ModelInfo(BaseModel):
    """A model as Anthropic's clients list it."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(BaseModel):
    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: Literal[False] = False

"""What the Responses API answers: the response object, its items, and the events of its stream."""

from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr

from rayfin.deployments.generation.logprobs import ChatTokenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(BaseModel):
    type: Literal["input_text"] = "input_text"
    text: str


class InputImage(BaseModel):
    type: Literal["input_image"] = "input_image"
    image_url: str
    detail: str = "auto"
    _path: str = PrivateAttr("input")  # in the request that has brought it, for errors

    @property
    def path(self) -> str:
        return self._path

    @classmethod
    def at(cls, path: str, image_url: str, detail: str) -> "InputImage":
        """An image of the part at ``path``."""
        image = cls(image_url=image_url, detail=detail)
        image._path = path
        return image


class OutputTextPart(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = Field(default_factory=list)


class ReasoningTextPart(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(BaseModel):
    type: Literal["summary_text"] = "summary_text"
    text: str


class OutputMessage(BaseModel):
    """A message of a conversation, of the input or of the output."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus = "completed"
    role: Literal["system", "developer", "user", "assistant"]
    content: list[InputText | InputImage | OutputTextPart]


class ReasoningItem(BaseModel):
    """What the model thought before it answered or called."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus = "completed"
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningTextPart]
    encrypted_content: None = None


def _is_none(value: object) -> bool:
    return value is None


class CallItem(BaseModel):
    """A call; the client answers it by an output with its ``call_id``."""

    id: str
    type: str
    status: ItemStatus = "completed"
    call_id: str


class FunctionCallItem(CallItem):
    type: Literal["function_call"] = "function_call"
    name: str
    namespace: str | None = Field(default=None, exclude_if=_is_none)
    arguments: str  # JSON


class CustomToolCallItem(CallItem):
    type: Literal["custom_tool_call"] = "custom_tool_call"
    name: str
    namespace: str | None = Field(default=None, exclude_if=_is_none)
    input: str


class ToolSearchCallItem(CallItem):
    """A search for tools, which the client runs."""

    type: Literal["tool_search_call"] = "tool_search_call"
    execution: Literal["client"] = "client"
    arguments: Any


class CallOutput(BaseModel):
    id: str
    type: str
    status: ItemStatus = "completed"
    call_id: str


class FunctionCallOutput(CallOutput):
    type: Literal["function_call_output"] = "function_call_output"
    output: str | list[InputText | InputImage]


class CustomToolCallOutput(CallOutput):
    type: Literal["custom_tool_call_output"] = "custom_tool_call_output"
    output: str | list[InputText | InputImage]


class ToolSearchOutput(CallOutput):
    type: Literal["tool_search_output"] = "tool_search_output"
    execution: Literal["client"] = "client"
    tools: list[dict[str, Any]]


Item = (
    OutputMessage
    | ReasoningItem
    | FunctionCallItem
    | CustomToolCallItem
    | ToolSearchCallItem
    | FunctionCallOutput
    | CustomToolCallOutput
    | ToolSearchOutput
)


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = Field(default_factory=OutputTokensDetails)
    total_tokens: int


class ResponseError(BaseModel):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Reasoning(BaseModel):
    effort: str | None = None
    summary: str | None = None


class RawMessage(BaseModel):
    """vLLM's: what the model has read or written, special tokens included."""

    type: Literal["raw_message_tokens"] = "raw_message_tokens"
    message: str
    tokens: list[int]


class ConversationRef(BaseModel):
    id: str


class Response(BaseModel):
    """A response as it stands; the second half repeats what the request asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # seconds since 1970
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[Item] = Field(default_factory=list)
    usage: ResponseUsage | None = None
    model: str
    background: bool
    conversation: ConversationRef | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt: None = None
    prompt_cache_diagnostics: None = None  # clients read it that know more than their library
    prompt_cache_key: str | None
    reasoning: Reasoning = Field(default_factory=Reasoning)
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any] = Field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    input_messages: list[RawMessage] | None = None  # with enable_response_messages, at the end
    output_messages: list[RawMessage] | None = None


class Deleted(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseStreamEvent(BaseModel):
    """One step of a response's life; ``sequence_number`` counts them from 0."""

    type: str
    sequence_number: int


class ResponseEvent(ResponseStreamEvent):
    response: Response


class ItemEvent(ResponseStreamEvent):
    output_index: int
    item: Item


class PartEvent(ResponseStreamEvent):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputTextPart | ReasoningTextPart


class TextDeltaEvent(ResponseStreamEvent):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ChatTokenLogprob] = Field(default_factory=list)


class TextDoneEvent(ResponseStreamEvent):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatTokenLogprob] = Field(default_factory=list)


class ReasoningDeltaEvent(ResponseStreamEvent):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDoneEvent(ResponseStreamEvent):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDeltaEvent(ResponseStreamEvent):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(ResponseStreamEvent):
    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDoneEvent(ResponseStreamEvent):
    item_id: str
    output_index: int
    input: str

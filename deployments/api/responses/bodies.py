"""What clients send to /v1/responses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.generation.members import check_members, ignored_members
from rayfin.deployments.guidance.tools import DeclaredTools, declared_tools, flat_tools
from rayfin.deployments.http.json_body import rename_error_params, rename_error_paths
from rayfin.deployments.text.checks import as_string, check_metadata, required

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (  # the others are parts of items or contents that no response here has
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("skip_special_tokens", "include_stop_str_in_output"),
)
OUR_PATHS = {".function.": "."}  # of chat tools -> of flat ones
OUR_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


class ResponseStreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_obfuscation: bool | None = None
    include_usage: bool | None = None  # the last event has it anyway


class ResponsePromptBody(BaseModel):
    """What makes the prompt of a response; None is the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None  # its id, or an object with it
    truncation: Literal["auto", "disabled"] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuses what is not served.

        Raises:
            InvalidRequest: ``param`` names the field.
        """
        check_members("responses", self.model_extra)

    @cached_property
    def declared_tools(self) -> DeclaredTools:
        """The checked tools, read once.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong, such as tools[0].parameters.
        """
        with rename_error_paths(OUR_PATHS):
            return declared_tools(self.tools, flat_tools)

    def conversation_id(self) -> str | None:
        """Raises:
        InvalidRequest: it is no id, or there is a previous response too.
        """
        given, path = self.conversation, "conversation"
        if isinstance(given, Mapping):
            given, path = required(given, "id", path), f"{path}.id"
        if given is not None and self.previous_response_id:
            raise InvalidRequest("A response has a conversation or a previous response.", path)
        return None if given is None else as_string(given, path)

    def ignored_fields(self) -> list[str]:
        inner = [f"text.{name}" for name in self.text or {} if name != "format"]
        asked = self.reasoning or {}
        inner += [f"reasoning.{name}" for name in asked if name != "effort" and asked[name]]
        inner += self.declared_tools.ignored_fields()
        return ignored_members("responses", self.model_extra) + inner


class ResponseRequest(ResponsePromptBody):
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    # As in vLLM
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    include: list[str] | None = None
    enable_response_messages: bool | None = None  # input_messages and output_messages
    top_logprobs: int | None = None  # so many of the likeliest tokens, where they are included

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def stored(self) -> bool:
        return self.store is not False

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The checked sampling settings; ``defaults`` hold where the request names nothing.

        Raises:
            InvalidRequest: a value out of range, or a field that is not served.
        """
        shared = {name: getattr(self, name) for name in (*SAMPLING, "priority", "cache_salt")}
        with rename_error_params(OUR_NAMES):
            params = GenerationBody(**shared).sampling_params(defaults, self.max_output_tokens)
            return replace(params, logprobs=self.top_logprobs or 0 if self.has_logprobs else None)

    def check(self) -> None:
        super().check()
        if not self.stream and any(value is not None for _, value in self.stream_options or ()):
            raise InvalidRequest("stream_options needs stream to be true.", "stream_options")
        if self.background and not self.stored:
            raise InvalidRequest("background needs store to be true.", "background")
        if self.background and self.enable_response_messages:
            raise InvalidRequest(
                "enable_response_messages does not go with background.", "enable_response_messages"
            )
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise InvalidRequest(
                f"top_logprobs must be at least 0, got {self.top_logprobs}.",
                "top_logprobs",
                "integer_below_min_value",
            )
        check_include(self.include or ())
        check_metadata(self.metadata or {})


def check_include(names: Sequence[str]) -> None:
    """Refuses what no response has.

    Raises:
        InvalidRequest: ``param`` is the path of the name.
    """
    for i, name in enumerate(names):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"include: there is no {name[:64]!r}.", f"include[{i}]")

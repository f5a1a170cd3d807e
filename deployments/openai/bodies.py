"""What clients send. Types are strict: "5" is no number, true is no integer, 1 is a float.

Ranges are the business of SamplingParams; fields that it knows and refuses are handed to it, so
that it names them. Unknown fields are accepted and their names reported.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams

MAX_PROMPTS = 128
MAX_STOP_LENGTH = 4096  # characters
COMPLETION_TOKENS = 16  # of /v1/completions where a request names no limit
PRIORITIES = range(-(2**31), 2**31)

UNSERVED: dict[
    str, tuple[object, ...]
] = {  # fields of other servers -> values that ask for nothing
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logprob_token_ids": (),
    "thinking_token_budget": (),
    "kv_transfer_params": (),
    "cache_salt": (),
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "suffix": ("",),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(BaseModel):
    """What both kinds of request share; None is the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Any = None
    user: str | None = None
    echo: bool | None = None
    # As in vLLM
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None  # see beams.py
    length_penalty: float | None = None
    early_stopping: Any = None
    # Refused by SamplingParams unless they ask for nothing
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: Any = None  # an integer for completions, a boolean for chat
    prompt_logprobs: int | None = None
    best_of: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    response_format: dict[str, Any] | None = None

    def ignored_fields(self) -> list[str]:
        return [name for name in self.model_extra or {} if name not in UNSERVED]

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(self.include_usage and options and options.continuous_usage_stats)

    def sampling_params(self, defaults: dict[str, Any], max_tokens: int | None) -> SamplingParams:
        """The checked sampling settings; ``defaults`` hold where the request names nothing.

        Raises:
            InvalidRequest: a value out of range, or a field that is not served.
        """
        self.check()
        named = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        given = {name: value for name, value in named.items() if value is not None}
        for name in ("logit_bias", "bad_words"):  # empty asks for nothing
            if name in given and not given[name]:
                del given[name]
        if given.get("logprobs") is False:
            del given["logprobs"]
        return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens})

    def check(self) -> None:
        """Refuses what no route serves.

        Raises:
            InvalidRequest: it names the field.
        """
        for name, value in (self.model_extra or {}).items():
            harmless = (None, *UNSERVED.get(name, (value,)))
            if not any(value is other or value == other for other in harmless):
                raise _unserved(name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true.", "stream_options")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequest("best_of cannot be streamed: the best are known late.", "best_of")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise _unserved("response_format", "other than text ")
        if self.priority is not None and self.priority not in PRIORITIES:
            raise InvalidRequest("priority must fit 32 bits.", "priority")
        _check_stop(self.stop)


class CompletionRequest(GenerationBody):
    prompt: Any = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids, none empty.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong, such as prompt[1].
        """
        value = self.prompt
        if value is None:
            raise InvalidRequest(
                "Missing required parameter: 'prompt'.", "prompt", "missing_required_parameter"
            )
        if isinstance(value, str):
            return [_text(value, "prompt")]
        if not isinstance(value, list):
            raise _not_a_prompt("prompt")
        if not value:
            raise InvalidRequest("'prompt' must not be empty.", "prompt", "empty_array")
        if isinstance(value[0], int):
            return [_token_ids(value, "prompt")]
        if len(value) > MAX_PROMPTS:
            raise InvalidRequest(
                f"'prompt' takes at most {MAX_PROMPTS} prompts, got {len(value)}.",
                "prompt",
                "array_above_max_length",
            )
        kind = type(value[0])
        prompts: list[str | list[int]] = []
        for i, item in enumerate(value):
            path = f"prompt[{i}]"
            if type(item) is not kind or not isinstance(item, str | list):
                raise _not_a_prompt(path)
            prompts.append(_text(item, path) if isinstance(item, str) else _token_ids(item, path))
        return prompts

    def token_limit(self) -> int:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class ChatCompletionRequest(GenerationBody):
    messages: Any = None
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def token_limit(self) -> int | None:
        """The caller's limit under either name; None fills the context."""
        names = (self.max_completion_tokens, self.max_tokens)
        if None not in names and names[0] != names[1]:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; set one of them.", "max_tokens"
            )
        return names[1] if names[0] is None else names[0]

    def check(self) -> None:
        super().check()
        if self.messages is None:
            raise InvalidRequest(
                "Missing required parameter: 'messages'.", "messages", "missing_required_parameter"
            )
        if self.tool_choice not in (None, "none", "auto"):
            if self.tool_choice == "required" or isinstance(self.tool_choice, dict):
                raise _unserved("tool_choice", "other than none and auto ")
            raise InvalidRequest("tool_choice must be none or auto.", "tool_choice")
        if self.tool_choice == "auto" and not self.tools:
            raise InvalidRequest("tool_choice auto needs tools.", "tool_choice")
        for name in ("echo", "top_logprobs"):
            if getattr(self, name):
                raise _unserved(name)


SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "seed", "stop", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("spaces_between_special_tokens", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logprobs", "prompt_logprobs", "best_of", "logit_bias"),
    *("allowed_token_ids", "bad_words"),
)


def _unserved(name: str, which: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"{name} {which}is not supported by this version of Rayfin.", name, "unsupported_parameter"
    )


def _check_stop(stop: object) -> None:
    for item in [] if stop is None else stop if isinstance(stop, list) else [stop]:
        if not isinstance(item, str):
            raise InvalidRequest(
                "stop must be a string or a list of strings.", "stop", "invalid_type"
            )
        if len(item) > MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"A stop string has at most {MAX_STOP_LENGTH} characters.",
                "stop",
                "string_above_max_length",
            )


def _not_a_prompt(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{path}': a prompt is a string or a list of token ids, and all prompts are of one kind.",
        path,
        "invalid_type",
    )


def _text(value: str, path: str) -> str:
    if not value:
        raise InvalidRequest(f"'{path}' must not be empty.", path, "empty_prompt")
    return value


def _token_ids(value: list[Any], path: str) -> list[int]:
    if not value:
        raise InvalidRequest(f"'{path}' must not be empty.", path, "empty_array")
    for i, token in enumerate(value):
        if type(token) is not int:
            raise InvalidRequest(
                f"'{path}[{i}]' must be a token id.", f"{path}[{i}]", "invalid_type"
            )
    return value

"""Fields and checks that the bodies of all generating routes share. Types are strict."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import BIAS_LIMIT, SamplingParams, listed
from rayfin.actors.settings.choices import LogprobsMode
from rayfin.deployments.generation.limits import PRIORITIES
from rayfin.deployments.generation.members import check_members, ignored_members
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.generation.prompt_forms import check_salt
from rayfin.deployments.guidance.fields import GUIDED, WHITESPACE, AnswerFormat, asked_format
from rayfin.deployments.http.request_id import LABEL

MAX_STOP_LENGTH = 4096  # characters

SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "seed", "stop", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("spaces_between_special_tokens", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "best_of", "logit_bias", "allowed_token_ids", "bad_words"),
    *("truncate_prompt_tokens", "repetition_detection", "logprobs_mode"),
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(BaseModel):
    """The fields of both kinds of completion; None is the same as leaving a field out."""

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
    return_weight_versions: bool | None = None  # docs/rollouts.md
    weight_version: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    use_beam_search: bool | None = None  # see beams.py
    length_penalty: float | None = None
    early_stopping: Any = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None  # docs/rollouts.md
    best_of: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None  # None: left
    cache_salt: str | None = None
    repetition_detection: dict[str, Any] | None = None  # see SamplingParams
    request_id: str | None = None  # a label: the last part of the answer's id
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None  # see guidance/fields.py
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    stream_interval: int | None = None  # tokens per chunk, except the first and the last
    session_id: str | None = None  # see Caller
    prompt_cache_key: str | None = None  # the same

    def ignored_fields(self) -> list[str]:
        extra = self.model_extra
        unread = ignored_members("completions", extra) if extra else []
        if self.structured_outputs is not None:
            unread += [name for name in GUIDED if getattr(self, name) is not None]
        return unread

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(self.include_usage and options and options.continuous_usage_stats)

    def sampling_params(self, defaults: dict[str, Any], max_tokens: int | None) -> SamplingParams:
        """Returns the checked sampling settings; ``defaults`` fill the fields that are left out.

        Raises:
            InvalidRequest: a value out of range, or a field that is not served.
        """
        self.check()
        named = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        given = {name: value for name, value in named.items() if value is not None}
        if given.get("top_p") == 0 and self.top_p is not False:
            given |= {"top_p": 1.0, "top_k": 1}  # the smallest set of tokens there is, as at OpenAI
        if max_tokens is None:
            max_tokens = defaults.get("max_tokens")
        token_ids = self.logprob_ids_wanted()
        return SamplingParams(
            **{**defaults, **given, "max_tokens": max_tokens},
            logprobs=None if token_ids else self.logprobs_wanted(),
            logprob_token_ids=token_ids,
            prompt_logprobs=self.prompt_logprobs_wanted(),
        )

    def answer_rules(self) -> AnswerRules:
        """Returns what the body says of the form of its answers."""
        form = self.answer_format()
        return (
            AnswerRules()
            if form is None
            else AnswerRules(structured=form.outputs, structured_param=form.param)
        )

    def answer_format(self) -> AnswerFormat | None:
        """Returns the form that the answers must have, or None for plain text.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong.
        """
        guided = {name: getattr(self, name) for name in (*GUIDED, WHITESPACE)}
        asked = (self.response_format, self.structured_outputs, *guided.values())
        if all(value is None for value in asked):
            return None
        return asked_format(self.response_format, self.structured_outputs, guided)

    def logprobs_wanted(self) -> int | None:
        """Returns the number of top log probabilities per token, or None for none at all."""
        return None

    def logprob_ids_wanted(self) -> list[int] | None:
        """Returns the tokens in place of the top ones, if the request names any."""
        return None

    def prompt_logprobs_wanted(self) -> int | None:
        """Returns the same for the prompt's tokens."""
        return self.prompt_logprobs

    def check(self) -> None:
        """Rejects fields that no route supports.

        Raises:
            InvalidRequest: ``param`` is the field.
        """
        if self.model_extra:
            check_members("completions", self.model_extra)
        if not self.stream and any(value is not None for _, value in self.stream_options or ()):
            raise InvalidRequest("stream_options needs stream to be true.", "stream_options")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequest("best_of cannot be streamed: the best are known late.", "best_of")
        self.answer_format()
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1):
                raise InvalidRequest("length_penalty needs use_beam_search.", "length_penalty")
            if self.early_stopping not in (None, False):
                raise InvalidRequest("early_stopping needs use_beam_search.", "early_stopping")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed.", "prompt_logprobs")
        if self.cache_salt is not None:
            check_salt(self.cache_salt)
        if self.request_id and not LABEL.fullmatch(self.request_id):
            raise InvalidRequest(
                "request_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ -", "request_id"
            )
        if self.priority is not None and self.priority not in PRIORITIES:
            raise InvalidRequest("priority must fit 32 bits.", "priority")
        if self.stream_interval is not None and self.stream_interval < 1:
            raise InvalidRequest(
                f"stream_interval must be at least 1, got {self.stream_interval}.",
                "stream_interval",
                "integer_below_min_value",
            )
        _check_bias(self.logit_bias or {})
        _check_stop(self.stop)


def _check_bias(biases: dict[str, float]) -> None:
    """Rejects larger biases, as OpenAI does; offline they are cut to the limit, as in vLLM."""
    if wrong := {token: bias for token, bias in biases.items() if abs(bias) > BIAS_LIMIT}:
        got = listed(f"{bias:g} for token {token[:24]}" for token, bias in wrong.items())
        raise InvalidRequest(
            f"logit_bias must be in [-{BIAS_LIMIT:g}, {BIAS_LIMIT:g}], got {got}.",
            "logit_bias",
            "decimal_above_max_value" if max(wrong.values()) > 0 else "decimal_below_min_value",
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

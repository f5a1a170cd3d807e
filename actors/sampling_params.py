"""The sampling settings of a request, validated once, with errors that name the field.

Names, ranges and defaults follow vLLM's ``SamplingParams`` so that programs written for it run
unchanged.
"""

import copy
import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import BeamParams, Repetition
from rayfin.actors.settings.choices import LogprobsMode
from rayfin.actors.structured_outputs import StructuredOutputs

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
MIN_TEMPERATURE = 0.01  # smaller ones are raised to this, or the division overflows float16
MAX_N = 16384
MAX_LOGIT_BIAS = 1024  # tokens
BIAS_LIMIT = 100.0  # larger ones are clipped to it
MAX_LOGPROB_IDS = 128
MAX_MASK = 1024  # tokens of a sampling mask
MAX_PATTERN = 1024  # tokens of a pattern that repeats
MAX_COPIES = 1 << 16
LONGEST_SHOWN = 24  # characters of each bad value in an error
SEED_BITS = 63
NUMBER = re.compile(r"-?[0-9]{1,18}")
NO_SEED = -1
NO_BUDGET = -1
UNSERVED = {  # fields of vLLM's, and what is near
    "extra_args": "",
    "flat_logprobs": "logprobs",
    "thinking_token_budget": "the field of this name over HTTP",
    "logits_processors": "logit_bias, allowed_token_ids, bad_words and structured_outputs",
    "guided_decoding": "structured_outputs",
    "use_beam_search": "LLM.beam_search",
    "skip_reading_prefix_cache": "cache_salt of a prompt",
}
WHOLE_VOCABULARY = -1  # as a number of log probabilities


class RequestOutputKind(Enum):
    """What each output of ``AsyncLLM.generate`` holds; the names and numbers are vLLM's."""

    CUMULATIVE = 0  # all of a choice so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, at the end

    @classmethod
    def of(cls, value: Any) -> "RequestOutputKind":
        """Returns the kind of a value: None, one of these, a number, or one of vLLM's.

        Raises:
            InvalidRequest: it is none.
        """
        try:
            return cls.CUMULATIVE if value is None else cls(getattr(value, "value", value))
        except ValueError:
            message = f"output_kind must be 0, 1 or 2, got {str(value)[:LONGEST_SHOWN]}."
            raise InvalidRequest(message, "output_kind") from None


@dataclass(slots=True)
class SamplingParams:
    """The sampling settings of one request.

    ``deployments/generation/build_requests.py`` checks what depends on the engine: its vocabulary
    and its ``max_logprobs``.

    Raises:
        InvalidRequest: a value outside its range; ``param`` names the field.
    """

    n: int = 1
    best_of: int | None = None  # choices to sample, of which the n likeliest are returned
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0
    seed: int | None = None  # None or -1: a random one
    max_tokens: int | None = 16  # None fills the context
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None  # number of likeliest tokens; -1 is the whole vocabulary
    prompt_logprobs: int | None = None  # the same, for each token of the prompt
    logprobs_mode: LogprobsMode | None = None  # of ``logprobs``; None is the engine's
    return_sampling_mask: bool = False  # the tokens that could be sampled; needs a ``top_k``
    # Ids whose log probabilities are returned, a row for each token of the prompt from the one
    # behind ``prompt_logprob_start``, or one row for all; -1 pads
    prompt_logprob_token_ids: Sequence[Sequence[int]] | Sequence[int] | None = None
    prompt_logprob_start: int = 0
    logit_bias: Mapping[int, float] | None = None  # keys may be numbers in strings, as in JSON
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None  # tokens to keep; -1: as many as fit the context
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None  # the answer's form
    # vLLM's fields that are refused unless they have no effect
    extra_args: dict[str, Any] | None = field(default=None)
    flat_logprobs: bool = False
    logprob_token_ids: Sequence[int] | None = None  # served: ``logprobs`` of these tokens
    thinking_token_budget: int | None = None
    # Ends an output that repeats itself: max_pattern_size, min_pattern_size, min_count
    repetition_detection: Mapping[str, int] | Repetition | None = None
    logits_processors: Sequence[Any] | None = None
    guided_decoding: Any = None
    use_beam_search: bool = False
    skip_reading_prefix_cache: bool | None = None
    output_kind: Any = None  # a RequestOutputKind, of ``AsyncLLM``; ``LLM`` gives whole outputs
    # vLLM's fields without effect: no one's settings are changed
    stream_interval: int | None = None
    skip_clone: bool = False

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Builds them of values that may be None for the default; ``max_tokens`` stays None.

        Raises:
            InvalidRequest: as the class.
        """
        given = {name: value for name, value in values.items() if value is not None}
        if "max_tokens" in values:
            given["max_tokens"] = values["max_tokens"]
        return cls(**given)

    def clone(self) -> "SamplingParams":
        """Returns a copy that shares nothing with these."""
        return copy.deepcopy(self)

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, None)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_below=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1, kinds=True)
        if self.seed == NO_SEED:
            self.seed = None
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is True:
                setattr(self, name, 1)
            elif count is not None:
                _integer(name, count, WHOLE_VOCABULARY, None)
        self.stop = _strings("stop", self.stop)
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True", "stop")
        self.bad_words = list(dict.fromkeys(_strings("bad_words", self.bad_words)))
        self.logit_bias = _biases(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must not be empty.", "allowed_token_ids")
        self._check_logprob_ids()
        self._check_prompt_ids()
        self._check_truncation()
        self.structured_outputs = _structured(self.structured_outputs)
        self.repetition_detection = _repetition(self.repetition_detection, self.min_tokens)
        for name, near in UNSERVED.items():
            if getattr(self, name) not in (None, False, {}, [], NO_BUDGET):
                raise InvalidRequest(
                    f"{name} is not supported by this version of Rayfin."
                    + (f" Near it is {near}." if near else ""),
                    name,
                    "unsupported_parameter",
                )
        self._settle_temperature()
        if self.top_k == -1:
            self.top_k = 0
        self._check_logprobs_mode()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt's tokens are wanted."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def fixed_seed(self, index: int = 0) -> int:
        """Returns the seed of choice ``index``: the caller's, or a random one.

        It is drawn before the request enters the engine, so that a replay samples the same tokens.
        """
        if self.seed is None:
            return secrets.randbits(SEED_BITS)
        return (self.seed + index) & ((1 << SEED_BITS) - 1)

    def _settle_temperature(self) -> None:
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        if self.temperature < GREEDY_BELOW:
            for name in ("n", "best_of"):
                if (getattr(self, name) or 1) > 1:
                    raise InvalidRequest(
                        f"{name} must be 1 when using greedy sampling, got {getattr(self, name)}.",
                        name,
                    )
            self.temperature = 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    def _check_logprob_ids(self) -> None:
        ids = self.logprob_token_ids = _token_ids("logprob_token_ids", self.logprob_token_ids)
        if len(ids) > MAX_LOGPROB_IDS:
            raise InvalidRequest(
                f"logprob_token_ids takes at most {MAX_LOGPROB_IDS} ids, got {len(ids)}.",
                "logprob_token_ids",
                "array_above_max_length",
            )
        if ids and self.logprobs is not None and self.logprobs != len(ids):
            raise InvalidRequest(
                "logprobs must be the number of logprob_token_ids beside them: got "
                f"{self.logprobs}, and {len(ids)} ids.",
                "logprob_token_ids",
            )

    def _check_logprobs_mode(self) -> None:
        modes = get_args(LogprobsMode)
        if self.logprobs_mode not in (None, *modes):
            wanted = ", ".join(modes)
            message = f"logprobs_mode must be one of {wanted}, got {self.logprobs_mode!r}."
            raise InvalidRequest(message[:256], "logprobs_mode")
        if not self.return_sampling_mask:
            return
        bounded = 0 < self.top_k <= MAX_MASK and not self.greedy
        if not bounded or self.logprob_token_ids or self.logprobs_mode == modes[0]:
            raise InvalidRequest(
                f"return_sampling_mask needs top_k from 1 to {MAX_MASK} and a temperature over 0, "
                "and goes neither with logprob_token_ids nor with raw_logprobs.",
                "return_sampling_mask",
            )

    def _check_prompt_ids(self) -> None:
        name, rows = "prompt_logprob_token_ids", self.prompt_logprob_token_ids
        _integer("prompt_logprob_start", self.prompt_logprob_start, 0, None)
        if rows is None:
            if self.prompt_logprob_start:
                raise InvalidRequest(f"prompt_logprob_start needs {name}.", "prompt_logprob_start")
            return
        if hasattr(rows, "tolist"):
            rows = rows.tolist()
        if not isinstance(rows, Sequence) or isinstance(rows, str) or not len(rows):
            raise InvalidRequest(f"{name} must hold token ids.", name, "invalid_type")
        if self.prompt_logprobs is not None:
            raise InvalidRequest(f"{name} does not go with prompt_logprobs.", name)
        for row in rows if isinstance(rows[0], Sequence) else [rows]:
            if not isinstance(row, Sequence) or isinstance(row, str):
                raise InvalidRequest(f"{name} must hold rows of token ids.", name, "invalid_type")
            for token in row:
                _integer(name, token, -1, None)
        self.prompt_logprob_token_ids = rows

    def _check_truncation(self) -> None:
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or at least 1, got 0.",
                "truncate_prompt_tokens",
                "integer_below_min_value",
            )


def _integer(name: str, value: object, low: int, high: int | None, *, kinds: bool = False) -> None:
    """Checks a range; ``kinds``: messages end with pydantic's kind, which vLLM's clients read."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(
            f"{name} must be an integer, got {value!r}.", name, code="invalid_type"
        )
    if value < low:
        kind = " (greater_than_equal)" if kinds else ""
        raise InvalidRequest(
            f"{name} must be at least {low}, got {value}{kind}.", name, "integer_below_min_value"
        )
    if high is not None and value > high:
        kind = " (less_than_equal)" if kinds else ""
        raise InvalidRequest(
            f"{name} must be at most {high}, got {value}{kind}.", name, "integer_above_max_value"
        )


def _number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}.", name, code="invalid_type")
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} must be finite, got {value}.", name)
    if value < low or (open_below and value == low):
        sign = "(" if open_below else "["
        bounds = f"in {sign}{low:g}, {high:g}]" if high < math.inf else f"over {low:g}"
        raise InvalidRequest(
            f"{name} must be {bounds}, got {value}.",
            name,
            code="decimal_below_min_value",
        )
    if value > high:
        raise InvalidRequest(
            f"{name} must be at most {high:g}, got {value}.", name, code="decimal_above_max_value"
        )


def _strings(name: str, value: str | Sequence[str] | None) -> list[str]:
    strings = [value] if isinstance(value, str) else list(value or [])
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"{name} must hold non-empty strings, got {string!r}.", name)
    return strings


def _token_ids(name: str, value: Sequence[int] | None) -> list[int]:
    ids = list(value or [])
    for token in ids:
        _integer(name, token, 0, None)
    return ids


def _biases(value: Mapping[int, float] | None) -> dict[int, float] | None:
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"logit_bias must map token ids to numbers, got {type(value).__name__}.",
            "logit_bias",
            code="invalid_type",
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(value)}.", "logit_bias"
        )
    tokens = {key: _token_id(key) for key in value}
    if wrong := [key for key, token in tokens.items() if token is None]:
        raise InvalidRequest(
            "logit_bias maps token ids to numbers, and "
            + listed(map(repr, wrong), "is no token id.", "are no token ids."),
            "logit_bias",
            "invalid_type",
        )
    if wrong := [token for token in tokens.values() if token is not None and token < 0]:
        raise InvalidRequest(
            f"logit_bias must be at least 0, got {listed(wrong)}.",
            "logit_bias",
            "integer_below_min_value",
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        _number("logit_bias", bias, -math.inf, math.inf)
        biases[tokens[key] or 0] = max(-BIAS_LIMIT, min(BIAS_LIMIT, float(bias)))
    return biases


def _token_id(key: object) -> int | None:
    if isinstance(key, str) and NUMBER.fullmatch(key):
        return int(key)
    return key if isinstance(key, int) and not isinstance(key, bool) else None


def listed(values: Iterable[object], one: str = "", several: str = "") -> str:
    """Returns all values for an error, each cut to a length, and the words for one or several."""
    words = [str(value)[:LONGEST_SHOWN] for value in values]
    return " ".join(filter(None, (", ".join(words), one if len(words) == 1 else several)))


REPETITION_KEYS = ("max_pattern_size", "min_pattern_size", "min_count")


def _repetition(value: object, min_tokens: int) -> Repetition | None:
    """The rule in a dict, or in an object with such attributes; a longest pattern of 0 is none."""
    if value is None or isinstance(value, Repetition):
        return value
    name = "repetition_detection"
    if not isinstance(value, Mapping):
        if not all(hasattr(value, key) for key in REPETITION_KEYS):
            raise InvalidRequest(
                f"{name} must be an object with {', '.join(REPETITION_KEYS)}.", name, "invalid_type"
            )
        value = {key: getattr(value, key) for key in REPETITION_KEYS}
    for key in value:
        if key not in REPETITION_KEYS:
            raise InvalidRequest(f"{name} has no field {str(key)[:64]!r}.", f"{name}.{key}"[:128])
    longest, shortest, copies = (value.get(key, 0) for key in REPETITION_KEYS)
    _integer(f"{name}.max_pattern_size", longest, 0, MAX_PATTERN)
    _integer(f"{name}.min_pattern_size", shortest, 0, longest)
    if longest == 0:
        return None
    _integer(f"{name}.min_count", copies, 2, MAX_COPIES)
    return Repetition(longest, max(shortest, 1), copies, min_tokens)


def _structured(value: object) -> StructuredOutputs | None:
    """A dict as the class; the kinds and their values are checked when the grammar is made."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            f"{name} must be a StructuredOutputs or a dict, got {type(value).__name__}.",
            name,
            "invalid_type",
        )
    for key in value:
        if key not in StructuredOutputs.__dataclass_fields__:
            raise InvalidRequest(f"{name} has no field {str(key)[:64]!r}.", f"{name}.{key}"[:128])
    return StructuredOutputs(**value)


# Beam search.

MAX_WIDTH = 128
MAX_LENGTH_PENALTY = 5.0
"""Its absolute value. The length of any context, raised to it, fits float32."""


@dataclass(slots=True)
class BeamSearchParams:
    """The settings of one beam search, under vLLM's names; their meaning is transformers'.

    Raises:
        InvalidRequest: a value outside its range; ``param`` names the field.
    """

    beam_width: int  # beams, and sequences returned
    max_tokens: int | None = None  # None: as many as fit
    ignore_eos: bool = False
    temperature: float = 0.0  # a search ranks log probabilities and samples nothing
    length_penalty: float = 1.0  # scores are divided by length ** length_penalty
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1, MAX_WIDTH)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        if self.temperature not in (0, 1):
            raise InvalidRequest(
                f"temperature must be 0 or 1 for a beam search, got {self.temperature!r}: "
                "it ranks the model's own log probabilities.",
                "temperature",
            )
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float):
            raise InvalidRequest(
                f"length_penalty must be a number, got {penalty!r}.",
                "length_penalty",
                "invalid_type",
            )
        if not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY):
            limit = MAX_LENGTH_PENALTY
            raise InvalidRequest(
                f"length_penalty must be in [-{limit:g}, {limit:g}], got {penalty}.",
                "length_penalty",
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequest(
                f"early_stopping must be true, false or 'never', got {self.early_stopping!r}.",
                "early_stopping",
            )

    def beams(self) -> BeamParams:
        """Returns what the engine needs."""
        return BeamParams(self.beam_width, float(self.length_penalty), self.early_stopping)

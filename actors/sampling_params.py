"""How one request is sampled; validated once, with errors that name the field.

Names, ranges and defaults follow vLLM's ``SamplingParams`` so that programs written for it run
unchanged. Fields that Rayfin knows but cannot honour yet are refused by name, never ignored.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.errors import InvalidRequest

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
MIN_TEMPERATURE = (
    0.01  # smaller ones are raised to this: the division would overflow half precision
)
MAX_N = 128
MAX_STOP_STRINGS = 4
SEED_BITS = 63


@dataclass(slots=True)
class SamplingParams:
    """The sampling settings of one request.

    Raises:
        InvalidRequest: a value outside its range; ``param`` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None fills the context
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    best_of: int | None = None  # choices that are sampled, of which the n likeliest come back
    # Known to clients of vLLM, not served yet: any value but the default is refused by name.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    extra_args: dict[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, None)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        self.stop = _strings("stop", self.stop, MAX_STOP_STRINGS)
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True", "stop")
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        if self.temperature < GREEDY_BELOW:
            for name in ("n", "best_of"):
                if (count := getattr(self, name) or 1) > 1:
                    raise InvalidRequest(
                        f"{name} must be 1 when using greedy sampling, got {count}.", name
                    )
            self.temperature = 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.top_k == -1:
            self.top_k = 0
        self._refuse_what_is_not_served()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def fixed_seed(self, index: int = 0) -> int:
        """The seed to sample choice ``index`` with: the caller's, or a fresh one drawn now.

        Drawn before the request enters the engine, so that a replay repeats the same tokens.
        """
        if self.seed is None:
            return secrets.randbits(SEED_BITS)
        return (self.seed + index) & ((1 << SEED_BITS) - 1)

    def _refuse_what_is_not_served(self) -> None:
        served_values: dict[str, Any] = {
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 1,
            "logprobs": None,
            "prompt_logprobs": None,
            "logit_bias": None,
            "allowed_token_ids": None,
            "bad_words": None,
            "extra_args": None,
        }
        for name, served in served_values.items():
            value = getattr(self, name)
            if value != served:
                raise InvalidRequest(
                    f"{name} is not supported by this version of Rayfin, got {value!r}.", name
                )


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(
            f"{name} must be an integer, got {value!r}.", name, code="invalid_type"
        )
    if value < low:
        raise InvalidRequest(
            f"{name} must be at least {low}, got {value}.", name, code="integer_below_min_value"
        )
    if high is not None and value > high:
        raise InvalidRequest(
            f"{name} must be at most {high}, got {value}.", name, code="integer_above_max_value"
        )


def _number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}.", name, code="invalid_type")
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} must be finite, got {value}.", name)
    if value < low or (open_below and value == low):
        sign = "(" if open_below else "["
        raise InvalidRequest(
            f"{name} must be in {sign}{low:g}, {high:g}], got {value}.",
            name,
            code="decimal_below_min_value",
        )
    if value > high:
        raise InvalidRequest(
            f"{name} must be at most {high:g}, got {value}.", name, code="decimal_above_max_value"
        )


def _strings(name: str, value: str | Sequence[str] | None, most: int) -> list[str]:
    strings = [value] if isinstance(value, str) else list(value or [])
    if len(strings) > most:
        raise InvalidRequest(f"{name} takes at most {most} strings, got {len(strings)}.", name)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"{name} must hold non-empty strings, got {string!r}.", name)
    return strings


def _token_ids(name: str, value: Sequence[int] | None) -> list[int]:
    ids = list(value or [])
    for token in ids:
        _integer(name, token, 0, None)
    return ids

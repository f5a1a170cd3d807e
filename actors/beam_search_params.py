"""How one beam search runs; validated once, with errors that name the field."""

import math
from dataclasses import dataclass
from typing import Literal

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import BeamParams

MAX_WIDTH = 128
MAX_LENGTH_PENALTY = 5.0
"""In either direction: the length of any context, raised to it, is a number of single precision."""


@dataclass(slots=True)
class BeamSearchParams:
    """The settings of one beam search, under vLLM's names; their meaning is transformers'.

    Raises:
        InvalidRequest: a value outside its range; ``param`` names the field.
    """

    beam_width: int  # beams, and sequences given back
    max_tokens: int | None = None  # None: as many as fit
    ignore_eos: bool = False
    temperature: float = 0.0  # a search ranks what the model says; nothing is drawn
    length_penalty: float = 1.0  # scores are divided by length ** length_penalty
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_integer("beam_width", self.beam_width, MAX_WIDTH)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, None)
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
        """What the engine needs to know of them."""
        return BeamParams(self.beam_width, float(self.length_penalty), self.early_stopping)


def _check_integer(name: str, value: object, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}.", name, "invalid_type")
    if value < 1:
        raise InvalidRequest(
            f"{name} must be at least 1, got {value}.", name, "integer_below_min_value"
        )
    if high is not None and value > high:
        raise InvalidRequest(
            f"{name} must be at most {high}, got {value}.", name, "integer_above_max_value"
        )

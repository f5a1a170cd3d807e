"""The form that an answer must have, with the names of vLLM's ``StructuredOutputsParams``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class StructuredOutputs:
    """Exactly one of the first six; checked once, when its grammar is made."""

    json: str | bool | Mapping[str, Any] | None = None  # a JSON schema, as an object or as text
    regex: str | None = None  # the whole answer matches it
    choice: Sequence[str] | None = None  # the answer is one of these
    grammar: str | None = None  # GBNF if it contains "::=", else Lark
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None  # of JSON
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    strict: bool | None = None  # False: a keyword that cannot be enforced is named, not refused


StructuredOutputsParams = StructuredOutputs
"""vLLM's name."""

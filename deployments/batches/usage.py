"""The tokens of a batch's answers, as OpenAI's object of a batch counts them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

# Names in the answers: OpenAI's chats, completions and embeddings; responses; Anthropic's messages,
# whose input_tokens leave out what was cached.
INPUT = (
    *("prompt_tokens", "input_tokens"),
    *("cache_read_input_tokens", "cache_creation_input_tokens"),
)
OUTPUT = ("completion_tokens", "output_tokens")
INPUT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
OUTPUT_DETAILS = ("completion_tokens_details", "output_tokens_details")


def usage_of(body: Any) -> Counter[str]:
    """Tokens of an answer: input, of these cached, output, of these reasoning; none if unknown."""
    usage = _part(body, "usage") or _part(_part(body, "meta"), "billed_units")  # Cohere's
    cached = [_part(usage, name) for name in INPUT_DETAILS]
    thought = [_part(usage, name) for name in OUTPUT_DETAILS]
    counts = {
        "input": sum(_number(usage, name) for name in INPUT),
        "cached": sum(_number(own, "cached_tokens") for own in cached)
        + _number(usage, "cache_read_input_tokens"),
        "output": sum(_number(usage, name) for name in OUTPUT),
        "reasoning": sum(_number(own, "reasoning_tokens") for own in thought),
    }
    return Counter({name: value for name, value in counts.items() if value})


def shown_usage(counts: Mapping[str, int]) -> dict[str, Any]:
    """OpenAI's object of ``usage_of``'s counts."""
    taken, given = counts.get("input", 0), counts.get("output", 0)
    return {
        "input_tokens": taken,
        "input_tokens_details": {"cached_tokens": counts.get("cached", 0)},
        "output_tokens": given,
        "output_tokens_details": {"reasoning_tokens": counts.get("reasoning", 0)},
        "total_tokens": taken + given,
    }


def _part(value: Any, name: str) -> dict[str, Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _number(value: dict[str, Any], name: str) -> int:
    found = value.get(name)
    return found if isinstance(found, int) else 0

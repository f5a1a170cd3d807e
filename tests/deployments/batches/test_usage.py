"""The tokens of answers, in the forms of all routes."""

from typing import Any

import pytest
from openai.types.batch_usage import BatchUsage

from rayfin.deployments.batches.objects import shown_usage, usage_of

CHAT = {
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
}
RESPONSE = {
    "usage": {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 10,
    }
}
MESSAGE = {
    "usage": {
        "input_tokens": 2,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 1,
        "output_tokens": 3,
    }
}
FULL = {"input": 7, "cached": 4, "output": 3, "reasoning": 2}


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (CHAT, FULL),
        (RESPONSE, FULL),
        (MESSAGE, {"input": 7, "cached": 4, "output": 3}),
        ({"usage": {"prompt_tokens": 5, "total_tokens": 5}}, {"input": 5}),
        ({"meta": {"billed_units": {"input_tokens": 5}}}, {"input": 5}),
        ({"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}}, {"input": 5}),
        (None, {}),
        ("text", {}),
        ([], {}),
        ({}, {}),
        ({"usage": 3}, {}),
        ({"usage": {"x": 1}}, {}),
    ],
)
def test_usage_of_a_body(body: Any, counts: dict[str, int]) -> None:
    assert usage_of(body) == counts


def test_the_object_is_openai_s() -> None:
    shown = BatchUsage.model_validate(shown_usage(FULL), strict=True)
    assert (shown.input_tokens, shown.output_tokens, shown.total_tokens) == (7, 3, 10)
    assert shown.input_tokens_details.cached_tokens == 4
    assert shown.output_tokens_details.reasoning_tokens == 2

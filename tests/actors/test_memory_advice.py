"""What an error about memory offers: settings that fit, with numbers."""

from typing import Any

import pytest

from rayfin.actors.config import EngineArgs, ModelFacts, resolve, resolve_limits
from rayfin.actors.errors import InvalidConfig


def why(facts: dict[str, Any], **args: Any) -> str:
    values = {"max_position": 4096, "page_bytes": 1000, "available_bytes": 10_500, **facts}
    known = ModelFacts(architecture="Llama", vocab_size=100, **values)
    given = EngineArgs(model="x", max_model_len=400, page_size=16, **args)
    with pytest.raises(InvalidConfig) as caught:
        resolve(given, known, resolve_limits(given, "cpu", 400))
    assert caught.value.param == "max_model_len"
    return str(caught.value)


def test_a_smaller_context_or_more_memory() -> None:
    text = why({})
    assert text.startswith("a request of 400 tokens needs 25 pages (25,000 bytes), 10 fit. What")
    assert text.endswith(": max_model_len 160; memory_utilization for 14,500 bytes more")


def test_smaller_pages() -> None:
    text = why({"smaller_pages": (("bfloat16", 500), ("fp8", 250))})
    assert "kv_cache_dtype 'bfloat16' for 336 tokens; kv_cache_dtype 'fp8' for all of it" in text


def test_4_bit_weights() -> None:
    assert "quantization 'int4' (9,000 bytes less) for 304 tokens" in why({"int4_saves": 9000})
    assert "int4" not in why({"int4_saves": 9000}, kv_cache_memory=9000)


def test_memory_that_was_given() -> None:
    assert why({}, kv_cache_memory=9000).endswith("max_model_len 144; kv_cache_memory 25000")
    assert why({}, num_pages=3).endswith("max_model_len 48; num_pages 25")


def test_no_page_at_all() -> None:
    text = why({"available_bytes": -500, "int4_saves": 2600})
    assert "0 fit. What fits: quantization 'int4' (2,600 bytes less) for 32 tokens;" in text

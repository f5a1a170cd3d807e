"""Settings: what is refused, and how the number of pages and the longest request come about."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from rayfin.actors.adapters.part import AdapterFacts
from rayfin.actors.code_version import code_version, grammar_version
from rayfin.actors.config import (
    BatchLimits,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    parse_weights,
    resolve,
    resolve_limits,
    resolve_model_len,
)
from rayfin.actors.errors import InvalidConfig, NoRoomNow
from rayfin.actors.settings.lora_limits import least_adapters

PAGE_BYTES = 1000


def _facts(pages: float, max_position: int | None = 256) -> ModelFacts:
    return ModelFacts(
        architecture="LlamaForCausalLM",
        vocab_size=128,
        max_position=max_position,
        page_bytes=PAGE_BYTES,
        available_bytes=int(pages * PAGE_BYTES),
    )


def _resolve(pages: float, *, max_position: int | None = 256, **args: Any) -> EngineConfig:
    engine_args = EngineArgs(**{"max_decoding_batch": 64, **args})
    facts = _facts(pages, max_position)
    model_len = resolve_model_len(engine_args, max_position)
    return resolve(engine_args, facts, resolve_limits(engine_args, "cpu", model_len))


@pytest.mark.parametrize(
    "name, value",
    [
        ("dtype", "float8"),
        ("kv_cache_dtype", "int4"),
        ("load_format", "pickle"),
        ("scheduler", "v2"),
        ("policy", "lifo"),
        ("device", "tpu"),
        ("max_model_len", 0),
        ("max_batch_tokens", -1),
        ("max_decoding_batch", 0),
        ("page_size", 0),
        ("kv_cache_memory", 0),
        ("max_waiting_requests", 0),
        ("threads", 0),
        ("memory_utilization", 0.0),
        ("preemption", "discard"),
        ("swap_space", -0.5),
        ("swap_space", float("nan")),
        ("swap_space", float("inf")),
        ("memory_utilization", 1.5),
        ("max_waiting_tokens", 0),
        ("priority_aging", -0.5),
        ("priority_aging", float("nan")),
        ("long_prefill_token_threshold", -1),
        ("itl_target_ms", 0),
        ("itl_target_ms", float("nan")),
        ("tenant_weights", "gold"),
        ("tenant_weights", "gold=4,"),
        ("tenant_weights", "gold=much"),
        ("tenant_weights", "gold=0"),
        ("tenant_weights", "gold=-1"),
        ("tenant_weights", "gold=nan"),
        ("tenant_weights", "=4"),
        ("tenant_weights", "gold=4,gold=5"),
        ("tenant_weights", "gold=4"),  # without the policy that reads it
        ("quantization", "int3"),
        ("steps_in_flight", 3),
        ("tensor_parallel_size", 0),
        ("pipeline_parallel_size", 0),
    ],
)
def test_refused_values(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as caught:
        EngineArgs.from_dict({name: value})
    assert caught.value.param == name
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_v0_never_splits_a_prompt() -> None:
    with pytest.raises(InvalidConfig, match="v0") as caught:
        EngineArgs(scheduler="v0", long_prefill_token_threshold=100)
    assert caught.value.param == "long_prefill_token_threshold"
    with pytest.raises(InvalidConfig, match="v0") as caught:
        EngineArgs(scheduler="v0", itl_target_ms=50)
    assert caught.value.param == "itl_target_ms"


def test_tenant_weights() -> None:
    config = _resolve(100, policy="fair", tenant_weights="gold=4, a=b = 0.5")
    assert config.tenant_weights == {"gold": 4.0, "a=b": 0.5}
    assert _resolve(100, policy="fair").tenant_weights == {}
    assert parse_weights("") == {}


def test_policies_reach_the_engine() -> None:
    config = _resolve(
        100,
        policy="priority",
        priority_aging=2.5,
        long_prefill_token_threshold=64,
        itl_target_ms=50,
        max_waiting_tokens=10,
    )
    assert config.itl_target == 0.05
    assert (config.policy, config.priority_aging) == ("priority", 2.5)
    assert (config.long_prefill_token_threshold, config.max_waiting_tokens) == (64, 10)


def test_unknown_setting() -> None:
    with pytest.raises(InvalidConfig, match="unknown setting 'max_tokens'") as caught:
        EngineArgs.from_dict({"model": "x", "max_tokens": 3})
    assert caught.value.param == "max_tokens"


def test_every_setting_has_help() -> None:
    assert all(field.metadata.get("help") for field in fields(EngineArgs))


def test_frozen() -> None:
    args = EngineArgs()
    with pytest.raises(FrozenInstanceError):
        args.model = "other"  # type: ignore[misc]


def test_pages_are_available_bytes_over_page_bytes() -> None:
    assert _resolve(100).num_pages == 100
    assert _resolve(100.999).num_pages == 100


def test_kv_cache_memory_goes_before_what_was_measured() -> None:
    assert _resolve(100, kv_cache_memory=20 * PAGE_BYTES + 1).num_pages == 20


def test_a_number_of_pages_goes_before_all_memory() -> None:
    assert _resolve(100, num_pages=30, kv_cache_memory=20 * PAGE_BYTES).num_pages == 30
    assert _resolve(100, num_pages=10**6, max_decoding_batch=1, max_model_len=17).num_pages == 2


def test_no_more_pages_than_all_slots_can_fill() -> None:
    config = _resolve(10**6, max_decoding_batch=3)
    assert config.num_pages == 3 * 256 // 16
    assert _resolve(10**6, max_decoding_batch=1, max_model_len=17).num_pages == 2


def test_swap_space_is_of_v0_or_asked_for() -> None:
    gib = PAGE_BYTES / 2**30
    assert _resolve(100).num_host_pages == 0
    assert _resolve(100, preemption="swap", swap_space=7.5 * gib).num_host_pages == 7
    assert _resolve(100, scheduler="v0", swap_space=7.5 * gib).num_host_pages == 7
    assert _resolve(100, scheduler="v0", preemption="recompute").num_host_pages == 0
    assert _resolve(100, scheduler="v0", swap_space=0).num_host_pages == 0


def test_no_more_swap_space_than_all_slots_can_fill() -> None:
    config = _resolve(20, preemption="swap", max_decoding_batch=3)
    assert (config.num_pages, config.num_host_pages) == (20, 3 * 256 // 16)
    config = _resolve(5, preemption="swap", max_decoding_batch=3)
    assert config.max_model_len == 5 * 16 and config.num_host_pages <= 3 * 256 // 16


def test_swap_space_without_room_for_a_page() -> None:
    for space in (0, 0.9 * PAGE_BYTES / 2**30):
        with pytest.raises(InvalidConfig, match="does not hold a page") as caught:
            _resolve(100, preemption="swap", swap_space=space)
        assert caught.value.param == "swap_space"


def test_model_len_shrinks_to_the_cache_unless_asked_for() -> None:
    config = _resolve(5)
    assert config.max_model_len == 5 * 16 and config.num_pages == 5
    with pytest.raises(InvalidConfig) as caught:
        _resolve(5, max_model_len=81)
    assert caught.value.param == "max_model_len"
    assert "6 pages" in str(caught.value) and "5 fit" in str(caught.value)
    assert _resolve(5, max_model_len=80).max_model_len == 80


@pytest.mark.parametrize("pages", [0.9, 0, -3])
def test_no_room_for_one_page(pages: float) -> None:
    with pytest.raises(InvalidConfig) as caught:
        _resolve(pages)
    assert "0 fit" in str(caught.value)


def test_any_request_fits_alone() -> None:
    """I13's ground: whatever is resolved, ``max_model_len`` tokens have their pages."""
    for pages in range(1, 40):
        for page_size in (1, 7, 16):
            config = _resolve(pages, page_size=page_size)
            assert config.max_pages_per_request <= config.num_pages
            assert config.max_pages_per_request * page_size >= config.max_model_len


def test_model_len() -> None:
    assert resolve_model_len(EngineArgs(), 256) == 256
    assert resolve_model_len(EngineArgs(), None) == 32_768
    assert resolve_model_len(EngineArgs(max_model_len=100), 256) == 100
    assert resolve_model_len(EngineArgs(max_model_len=10**6), None) == 10**6
    with pytest.raises(InvalidConfig) as caught:
        resolve_model_len(EngineArgs(max_model_len=257), 256)
    assert caught.value.param == "max_model_len"


def test_limits() -> None:
    assert resolve_limits(EngineArgs(), "cpu", 256) == BatchLimits(
        max_batch_tokens=256, max_decoding_batch=64, max_prefill_batch=16
    )
    assert resolve_limits(EngineArgs(), "cuda", 256) == BatchLimits(
        max_batch_tokens=8192, max_decoding_batch=256, max_prefill_batch=256
    )
    assert resolve_limits(EngineArgs(), "cuda", 256, row_by_row=True).max_prefill_batch == 16
    assert resolve_limits(EngineArgs(), "cpu", 9, whole_prompts=True).max_prefill_batch == 64
    assert resolve_limits(EngineArgs(max_decoding_batch=2000), "cpu", 9).max_batch_tokens == 2000
    with pytest.raises(InvalidConfig) as caught:
        resolve_limits(EngineArgs(max_decoding_batch=9, max_batch_tokens=8), "cpu", 256)
    assert caught.value.param == "max_decoding_batch"


def test_v0_steps_hold_the_longest_prompt() -> None:
    assert resolve_limits(EngineArgs(scheduler="v0"), "cpu", 5000).max_batch_tokens == 5000
    small = EngineArgs(scheduler="v0", max_batch_tokens=64)
    assert resolve_limits(small, "cpu", 100).max_batch_tokens == 100


def test_identity_is_of_what_decides_tokens() -> None:
    plain = EngineArgs(model="m")
    versions = f"code={code_version()} llguidance={grammar_version()}"
    assert plain.identity == f"{versions} model=m"
    other_sizes = replace(plain, threads=3, max_model_len=9, tensor_parallel_size=2)
    assert other_sizes.identity == plain.identity
    others = [
        {"model": "n"},
        {"tokenizer": "t"},
        {"revision": "r"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"activations": "int8"},
        {"kv_cache_dtype": "float16"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
    ]
    assert len({replace(plain, **other).identity for other in others} | {plain.identity}) == 10


# What an error about memory offers.


def error_of(facts: dict[str, Any], **args: Any) -> InvalidConfig:
    values = {"max_position": 4096, "page_bytes": 1000, "available_bytes": 10_500, **facts}
    known = ModelFacts(architecture="Llama", vocab_size=100, **values)
    given = EngineArgs(model="x", max_model_len=400, page_size=16, **args)
    with pytest.raises(InvalidConfig) as caught:
        resolve(given, known, resolve_limits(given, "cpu", 400))
    assert caught.value.param == "max_model_len"
    return caught.value


def why_too_long(facts: dict[str, Any], **args: Any) -> str:
    return str(error_of(facts, **args))


def test_a_smaller_context_or_more_memory() -> None:
    text = why_too_long({})
    assert text.startswith("a request of 400 tokens needs 25 pages (25,000 bytes), 10 fit. What")
    assert text.endswith(": max_model_len 160; memory_utilization for 14,500 bytes more")


def test_smaller_pages() -> None:
    text = why_too_long({"smaller_pages": (("bfloat16", 500), ("fp8", 250))})
    assert "kv_cache_dtype 'bfloat16' for 336; kv_cache_dtype 'fp8' for 400" in text


def test_4_bit_weights() -> None:
    assert "quantization 'int4' (9,000 bytes less) for 304;" in why_too_long({"int4_saves": 9000})
    assert "int4" not in why_too_long({"int4_saves": 9000}, kv_cache_memory=9000)


def test_fewer_adapters() -> None:
    smaller = least_adapters(EngineArgs(model="x", enable_lora=True), 32 * 64 * 10, "cpu")
    facts = {"parts": (AdapterFacts(num_bytes=32 * 64 * 10, smaller=smaller),)}
    text = why_too_long(facts, enable_lora=True)
    assert "max_loras 1 with max_lora_rank 16 (20,320 bytes less) for 400;" in text
    assert "lora" not in why_too_long(facts, enable_lora=True, kv_cache_memory=9000)


def test_memory_that_was_given() -> None:
    assert why_too_long({}, kv_cache_memory=9000).endswith(
        "max_model_len 144; kv_cache_memory 25000"
    )
    assert why_too_long({}, num_pages=3).endswith("max_model_len 48; num_pages 25")


def test_only_memory_that_was_measured_may_be_free_later() -> None:
    for fixed in ({"num_pages": 3}, {"kv_cache_memory": 9000}, {}):
        assert (error_of({}, **fixed).__class__ is NoRoomNow) == (not fixed)


def test_no_page_at_all() -> None:
    text = why_too_long({"available_bytes": -500, "int4_saves": 2600})
    assert "0 fit. What fits: quantization 'int4' (2,600 bytes less) for 32;" in text


def test_the_memory_of_an_engine_is_what_it_holds_and_its_pages() -> None:
    facts = replace(_facts(100), share_bytes=100 * PAGE_BYTES + 5000)
    args = EngineArgs(num_pages=60)
    config = resolve(args, facts, resolve_limits(args, "cpu", 256))
    assert config.memory_bytes == 5000 + 60 * PAGE_BYTES
    assert _resolve(100).memory_bytes == 0  # nothing was measured

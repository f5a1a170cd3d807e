"""Where an engine speculates without being asked."""

from dataclasses import replace

import pytest

from rayfin.actors.config import BatchLimits, EngineArgs, ModelFacts, resolve

LIMITS = BatchLimits(max_batch_tokens=64, max_decoding_batch=4, max_prefill_batch=4)
FACTS = ModelFacts(
    architecture="Tiny",
    vocab_size=100,
    max_position=256,
    page_bytes=1024,
    available_bytes=1 << 20,
)


def method(args: EngineArgs, facts: ModelFacts = FACTS) -> str | None:
    speculation = resolve(args, facts, LIMITS).speculation
    return None if speculation is None else speculation.method


def test_a_decoder_on_one_cpu_looks_up_ngrams() -> None:
    config = resolve(EngineArgs(), FACTS, LIMITS)
    assert config.speculation is not None and config.speculation.method == "ngram"
    assert config.num_speculative_tokens == 5


@pytest.mark.parametrize(
    "facts",
    [
        replace(FACTS, device="cuda"),
        replace(FACTS, state_bytes=64),
        replace(FACTS, whole_prompts=True),
        replace(FACTS, pools=True),
        replace(FACTS, fixed_bits=False),
        replace(FACTS, page_bytes=0, state_bytes=64),
    ],
    ids=["GPU", "hybrid", "encoder", "embeddings", "torch", "recurrent"],
)
def test_other_models_and_devices_do_not(facts: ModelFacts) -> None:
    assert method(EngineArgs(), facts) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"spec_method": "none"},
        {"speculative_config": '{"method": "none"}'},
        {"scheduler": "v0"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_settings_that_leave_it_off(settings: dict[str, object]) -> None:
    assert method(EngineArgs.from_dict(settings)) is None


def test_a_named_method_is_taken() -> None:
    assert method(EngineArgs(spec_method="suffix")) == "suffix"
    assert method(EngineArgs(spec_model="drafter")) == "draft_model"
    assert method(EngineArgs(spec_model="drafter"), replace(FACTS, device="cuda")) == "draft_model"
    assert method(EngineArgs(spec_method="ngram"), replace(FACTS, state_bytes=64)) == "ngram"

"""Every change of hf_overrides counts, as in a checkpoint that holds the value, or is an error."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
)

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.models.overrides import overridden

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THETA = {"rope_theta": 5e5}
SCALED = LLAMA3 | THETA | {"original_max_position_embeddings": 64}


def llama(**values: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES, max_position_embeddings=256, **values)


@pytest.mark.parametrize(
    ("before", "changes", "expected"),
    [
        (THETA, {"rope_theta": 777}, {"rope_theta": 777, "rope_type": "default"}),
        (THETA, {"rope_theta": 10000.0}, {"rope_theta": 10000.0, "rope_type": "default"}),
        (THETA, {"rope_parameters": {"rope_theta": 7}}, {"rope_theta": 7, "rope_type": "default"}),
        (SCALED, {"rope_theta": 777}, SCALED | {"rope_theta": 777}),
        (SCALED, {"rope_parameters": {"factor": 2.0}}, SCALED | {"factor": 2.0}),
        (SCALED, {"rope_scaling": {"factor": 2.0}}, SCALED | {"factor": 2.0}),
        (THETA, {"rope_scaling": YARN}, YARN | THETA),
        (THETA, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7},
         {"rope_type": "linear", "factor": 2.0, "rope_theta": 7}),
        (SCALED, {"rope_scaling": YARN}, YARN | THETA),
        (SCALED, {"rope_parameters": {"rope_type": "default"}}, {"rope_type": "default"} | THETA),
        (THETA, {"partial_rotary_factor": 0.5},
         {"rope_type": "default", "partial_rotary_factor": 0.5} | THETA),
    ],
)  # fmt: skip
def test_rotary_settings_under_old_and_new_names(
    before: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = llama(rope_parameters=dict(before))
    assert overridden(config, changes).rope_parameters == expected
    assert config.rope_parameters["rope_theta"] == 5e5, "the model's own is left as it is"


@pytest.mark.parametrize(
    ("config", "changes", "name", "expected"),
    [
        (llama(), {"torch_dtype": "float16"}, "dtype", torch.float16),
        (llama(dtype="float16"), {"dtype": "float16"}, "dtype", torch.float16),
        (GPT2Config(), {"hidden_size": 96}, "n_embd", 96),
        (GPT2Config(), {"n_embd": 96}, "hidden_size", 96),
        (GPT2Config(), {"max_position_embeddings": 64}, "n_positions", 64),
        (llama(), {"num_labels": 5}, "num_labels", 5),
        (llama(id2label={0: "a", 1: "b", 2: "c"}), {"num_labels": 5}, "num_labels", 5),
        (llama(), {"architectures": ["X"]}, "architectures", ["X"]),
        (llama(), {"classifier_from_token": ["no", "yes"]}, "classifier_from_token", ["no", "yes"]),
        (llama(extra={"a": 1, "b": 2}), {"extra": {"b": 3}}, "extra", {"a": 1, "b": 3}),
    ],
)
def test_other_names(
    config: PretrainedConfig, changes: dict[str, Any], name: str, expected: Any
) -> None:
    assert getattr(overridden(config, changes), name) == expected


def test_nested_configurations_follow_the_same_rules() -> None:
    text = Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8)
    config = Gemma3Config(text_config=text.to_dict())
    deep = {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}, "sliding_window": 9}
    changed = overridden(config, {"text_config": deep}).text_config
    assert changed.rope_parameters["full_attention"]["rope_theta"] == 7.0
    assert changed.rope_parameters["sliding_attention"] == text.rope_parameters["sliding_attention"]
    assert (changed.sliding_window, changed.hidden_size) == (9, 32)
    neox = GPTNeoXConfig(**SIZES)
    assert overridden(neox, {"rotary_pct": 0.5}).rope_parameters["partial_rotary_factor"] == 0.5
    assert overridden(neox, {"rotary_emb_base": 7}).rope_parameters["rope_theta"] == 7


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("llama", {"max_position_embedding": 9}, "no max_position_embedding; near names: max_pos"),
        ("llama", {"new": 1}, "LlamaConfig has no new"),
        ("llama", {"rope_scaling": None}, '"rope_parameters": {"rope_type": "default"}'),
        ("llama", {"rope_scaling": {"factor": 4.0}}, "no effect without a rope_type"),
        ("llama", {"rope_parameters": {"rope_tetha": 4.0}}, "no 'rope_tetha'; near names: rope_th"),
        ("llama", {"eos_token_id": 4}, "use override_generation_config"),
        ("llama", {"temperature": 0.5}, "has no temperature"),
        ("gemma3_text", {"rope_theta": 7}, "rope_parameters.full_attention"),
        ("gemma3_text", {"rope_scaling": YARN}, "rope_parameters.full_attention"),
        ("gemma3", {"sliding_window": 7}, "a value of text_config"),
        ("gemma3", {"rope_theta": 7}, "a value of text_config"),
        ("gemma3", {"text_config": {"slidingwindow": 7}}, "no text_config.slidingwindow; near"),
        ("gemma3", {"text_config": 7}, "text_config must be an object"),
    ],
)
def test_what_would_not_count_is_an_error(kind: str, changes: dict[str, Any], says: str) -> None:
    config = AutoConfig.for_model(kind)
    with pytest.raises(InvalidConfig) as caught:
        overridden(config, changes)
    assert says in str(caught.value) and caught.value.param == "hf_overrides"


def test_a_model_with_code_of_its_own_may_read_any_name() -> None:
    assert overridden(llama(), {"new": 1}, any_name=True).new == 1

"""Settings of speculative decoding: vLLM's keys, and errors that say what to do."""

from typing import Any

import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.speculation import SpeculativeConfig, read_speculation


def test_written_in_three_ways() -> None:
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    settings = {"method": "ngram", "num_speculative_tokens": 3}
    assert EngineArgs.from_dict({"speculative_config": settings}).speculation == expected
    written = EngineArgs(speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
    assert written.speculation == expected
    assert EngineArgs(spec_method="ngram", spec_tokens=3).speculation == expected
    both = EngineArgs(speculative_config='{"method": "ngram"}', spec_tokens=3)
    assert both.speculation == expected
    small = SpeculativeConfig(method="draft_model", model="org/small")
    assert EngineArgs(spec_model="org/small").speculation == small
    assert EngineArgs().speculation is None
    assert EngineArgs(spec_method="deepseek_mtp").speculation == SpeculativeConfig(method="mtp")
    assert read_speculation({"model": "ngram"}) == SpeculativeConfig(method="ngram")
    assert read_speculation({"method": "ngram_gpu"}) == SpeculativeConfig(method="ngram")


def test_most_tokens_by_device() -> None:
    assert SpeculativeConfig(method="suffix").most_tokens("cpu") == 16
    config = SpeculativeConfig(method="ngram")
    assert (config.most_tokens("cpu"), config.most_tokens("cuda")) == (5, 7)
    assert SpeculativeConfig(method="ngram", num_speculative_tokens=2).most_tokens("cpu") == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_config": "{x"}, "is not JSON"),
        ({"speculative_config": "3"}, "must be an object"),
        ({"speculative_config": {"method": "ngram", "depth": 1}}, "unknown key 'depth'; known:"),
        ({"speculative_config": {"method": "fly"}}, "would not have sampled"),
        ({"speculative_config": {"method": "ngram", "rejection_sample_method": "block"}}, "remove"),
        ({"speculative_config": {"method": "ngram", "synthetic_acceptance_rate": 1}}, "remove it"),
        ({"speculative_config": {"method": "medusa"}}, "Medusa heads"),
        ({"speculative_config": {"method": "eagle"}}, "'eagle' needs a model"),
        ({"speculative_config": {"method": "eagle3"}}, "'eagle3' needs a model"),
        ({"speculative_config": {"method": "mtp", "model": "org/head"}}, "no meaning"),
        ({"spec_method": "mtp", "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_config": {"method": "draft_model"}}, "needs a model"),
        ({"spec_model": "org/small", "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_config": {"method": "ngram", "model": "org/small"}}, "no meaning"),
        ({"speculative_config": {"method": "ngram", "adaptive": 1}}, "of type bool, got 1"),
        ({"speculative_config": {"method": "ngram"}, "spec_method": "eagle3"}, "set twice"),
        ({"spec_tokens": 3}, "must name a method"),
        ({"spec_method": "ngram", "spec_tokens": 0}, "between 1 and 16, got 0"),
        ({"spec_method": "ngram", "scheduler": "v0"}, "needs scheduler 'v1'"),
        ({"spec_method": "ngram", "pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_min": 5}},
            "prompt_lookup_min and prompt_lookup_max",
        ),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        EngineArgs.from_dict(settings)
    assert caught.value.param == "speculative_config"

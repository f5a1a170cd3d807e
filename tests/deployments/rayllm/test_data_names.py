"""Ray Data's names, without Ray Data."""

from typing import Any

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.data import vLLMEngineProcessorConfig
from rayfin.deployments.rayllm.data_config import model_args
from rayfin.deployments.rayllm.data_names import ERROR, RayNames, read_ray_config


def read(**fields: Any) -> Any:
    return read_ray_config(vLLMEngineProcessorConfig(model_source="demo", **fields), None)


def test_fields_become_those_of_rayfin() -> None:
    config, names = read(
        engine_kwargs={"max_num_batched_tokens": 512, "enable_prefix_caching": True},
        concurrency=4,
        batch_size=64,
        max_concurrent_batches=2,
        accelerator_type="L4",
        runtime_env={"env_vars": {"A": "1"}},
        chat_template_stage={"chat_template_kwargs": {"enable_thinking": False}},
        should_continue_on_error=True,
    )
    assert (config.concurrency, config.batch_size, config.concurrent_batches) == ((1, 4), 64, 2)
    assert config.num_gpus == 1
    assert names.options == {"runtime_env": {"env_vars": {"A": "1"}}, "accelerator_type": "L4"}
    model = model_args(config)
    assert model.engine.max_batch_tokens == 512
    assert model.server.default_chat_template_kwargs == {"enable_thinking": False}
    config, _ = read(concurrency=(2, 3), task_type="embed")
    assert (config.concurrency, config.task, config.num_gpus) == ((2, 3), "embed", 0)


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_siz"):
        read(batch_siz=3)
    with pytest.raises(InvalidConfig, match="near it is max_num_seqs"):
        read(engine_kwargs={"max_num_seq": 3})
    with pytest.raises(InvalidConfig, match="one worker"):
        read(placement_group_config={"bundles": [{"GPU": 1}, {"GPU": 1}]})


def test_columns_have_rays_names_and_a_bad_row_ends_the_job_or_not() -> None:
    row = {"id": 3, "token_ids": [1], "generated_text": "a", "error": None}
    expected = {"id": 3, "generated_tokens": [1], "generated_text": "a"}
    assert RayNames(False).answered(dict(row)) == expected
    assert RayNames(True).answered(dict(row)) == expected | {ERROR: ""}
    failed = row | {"error": "too long"}
    assert RayNames(True).answered(dict(failed))[ERROR] == "too long"
    with pytest.raises(RuntimeError, match="too long"):
        RayNames(False).answered(dict(failed))
    given = RayNames(False).given({"tokenized_prompt": [1], "messages": [], "model": "own"})
    assert (given["prompt_token_ids"], given["lora"], "messages" in given) == ([1], "own", False)

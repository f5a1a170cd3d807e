"""A group of two runner actors gives the tokens of one, also when one of them is killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from quantised import QuantisedModel
from rayfin import LLM, SamplingParams

PROMPTS = [[5, 9, 3, 100, 7, 7, 60, 2, 44, 31, 8], [4, 9, 90]]
LENGTH = 24


def _tokens(llm: LLM) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kind", ["plain", "gptq desc_act"])
def test_two_ranks(
    kind: str,
    cluster: None,
    settings: dict[str, Any],
    tiny_model: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    """Each rank is a process of its own; when one dies, the group is restarted as a whole."""
    tiny = tiny_model("qwen3") if kind == "plain" else QuantisedModel(kind, "qwen3", tmp_path)
    expected = [tiny.greedy(prompt, LENGTH) for prompt in PROMPTS]
    own = {**settings, "model": str(tiny.folder), "tokenizer": "demo", "dtype": "float32"}
    with LLM(executor="ray", tensor_parallel_size=2, **own) as llm:
        assert _tokens(llm) == expected
        scheduler = llm._engine._scheduler  # type: ignore[attr-defined]
        pids = [runner.pid for runner in ray.get(scheduler.runners.remote())]
        assert len(set(pids)) == 2
        os.kill(pids[1], signal.SIGKILL)
        assert _tokens(llm) == expected
        assert not set(pids) & {runner.pid for runner in ray.get(scheduler.runners.remote())}

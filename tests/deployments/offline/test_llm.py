"""``LLM``: the methods beside generate and chat, in this process and as Ray actors."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.offline.metrics import Counter, Gauge, HistogramMetric

SETTINGS: dict[str, Any] = {"threads": 1, "kv_cache_memory": 16 * 2**20}
PROMPTS = ["The zebra said to the lion that " * 8, "a b", "c d"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS, override_generation_config={"top_k": 9}) as made:
        yield made


def ids(outputs: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_enqueued_prompts_are_those_of_generate(llm: LLM) -> None:
    expected = ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    names = [*llm.enqueue(PROMPTS[0], GREEDY), *llm.enqueue(PROMPTS[1:], [GREEDY, GREEDY])]
    with pytest.raises(InvalidRequest):
        llm.enqueue(["", "x"], [GREEDY])
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == names
    assert ids(outputs) == expected
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_cached_prefixes_are_removed(llm: LLM) -> None:
    def cached() -> int:
        return llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].num_cached_tokens

    cached()
    assert cached() > 0
    assert llm.reset_prefix_cache() is True
    assert cached() == 0


def test_sleep_frees_and_wake_up_goes_on(llm: LLM) -> None:
    expected = ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    with pytest.raises(InvalidRequest, match="level must be 0 or 1"):
        llm.sleep(level=2)
    llm.sleep(level=1)
    with pytest.raises(InvalidRequest, match="wake_up"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert ids(outputs) == expected and outputs[0].num_cached_tokens == 0


def test_metrics_have_vllms_classes_and_names(llm: LLM) -> None:
    def generated() -> int:
        (found,) = [m for m in llm.get_metrics() if m.name == "vllm:generation_tokens"]
        assert isinstance(found, Counter)
        return found.value

    before = generated()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert generated() - before == 3 * 6
    by_name = {metric.name: metric for metric in llm.get_metrics()}
    running = by_name["vllm:num_requests_running"]
    assert isinstance(running, Gauge) and running.value == 0
    histograms = [m for m in by_name.values() if isinstance(m, HistogramMetric) and m.count]
    assert histograms and all(m.buckets["+Inf"] == m.count for m in histograms)


def test_the_tokenizer_and_defaults(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer.chat_template
    assert llm.get_default_sampling_params().top_k == 9

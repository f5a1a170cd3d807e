"""Every sampling setting through the whole system: HTTP over actors, streams, this process."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.deployments.offline.outputs import CompletionOutput
from rayfin.deployments.serve.preflight import model_path
from rayfin.deployments.text.tokenizer import Tokenizer

PROMPT = "What is the capital of France? And of the United States?"
LENGTH = 16
TOLERANCE = 1e-4
SETTINGS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 2.0, "max_tokens": 48},
    "presence": {"presence_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {"40": 18, "41": 17.5, "50": -100}},
    "allowed": {"allowed_token_ids": list(range(100, 140))},
    "bad words": {"bad_words": ["Paris", "the", "is"]},
    "everything": {
        "temperature": 1.8,
        "seed": 11,
        "top_p": 0.99,
        "min_p": 0.01,
        "top_k": 40,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        "logit_bias": {"44": 1.5},
        "bad_words": ["a"],
        "min_tokens": 5,
    },
}


@pytest.fixture(scope="module")
def reference(model: str) -> Any:
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(model_path(model), dtype=torch.float32).eval()


def log_softmax(reference: Any, ids: list[int]) -> torch.Tensor:
    """[T, V]: what is thought of the token after each of ``ids``."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0].float()
    return logits.log_softmax(-1)


def own(solo: LLM, **settings: Any) -> CompletionOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, **settings})
    return solo.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_http_streams_and_this_process_agree(name: str, app: Any, solo: LLM) -> None:
    settings = {"ignore_eos": True, **SETTINGS[name]}
    expected = own(solo, **settings)
    assert expected.token_ids != own(solo, ignore_eos=True).token_ids  # it does something
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, "return_token_ids": True}
    body |= settings
    with app.client() as http:
        choice = http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
        stream = http.post("/v1/completions", json={**body, "stream": True}).text
    assert (choice["text"], choice["token_ids"]) == (expected.text, expected.token_ids)
    lines = [line for line in stream.splitlines() if line.startswith("data: {")]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(piece["text"] for piece in pieces) == expected.text
    assert [token for piece in pieces for token in piece["token_ids"]] == expected.token_ids


def test_rules_are_kept(solo: LLM) -> None:
    assert set(own(solo, **SETTINGS["allowed"]).token_ids) <= set(range(100, 140))
    assert set(own(solo, logit_bias={44: 100}).token_ids) == {44}
    text = own(solo, ignore_eos=True, max_tokens=40).text
    tokenizer = Tokenizer.load(model_path("demo"))
    word = next(  # one that is as long at the start of a text, so that both forms are banned
        word
        for word in text.split()
        if word.isalpha() and len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}"))
    )
    banned = own(solo, ignore_eos=True, max_tokens=40, bad_words=[word]).text
    assert word in text.split() and word not in banned.split()


def test_log_probabilities_are_transformers(solo: LLM, reference: Any) -> None:
    """Of prompt and output, whatever else the settings do to the logits."""
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        repetition_penalty=1.4,
        bad_words=["the"],
        max_tokens=LENGTH,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
    )
    result = solo.generate(PROMPT, params, use_tqdm=False)[0]
    output, tokenizer = result.outputs[0], Tokenizer.load(model_path("demo"))
    ids = [*result.prompt_token_ids, *output.token_ids]
    expected = log_softmax(reference, ids)
    assert output.logprobs is not None and result.prompt_logprobs is not None
    reported = result.prompt_logprobs + output.logprobs
    assert reported[0] is None and len(reported) == len(ids)
    for position, entry in enumerate(reported[1:], start=1):
        assert entry is not None
        row, token = expected[position - 1], ids[position]
        assert next(iter(entry)) == token
        most = 2 if position < len(result.prompt_token_ids) else 3
        assert len(entry) in (most, most + 1)
        for other, logprob in entry.items():
            assert abs(logprob.logprob - float(row[other])) < TOLERANCE
            assert logprob.decoded_token == tokenizer.token_text(other)
            near = int(((row - row[other]).abs() < TOLERANCE).sum())
            assert logprob.rank is not None
            assert abs(logprob.rank - 1 - int((row > row[other]).sum())) < near
        likeliest = sorted((own.logprob for own in entry.values()), reverse=True)[:most]
        assert torch.allclose(torch.tensor(likeliest), row.topk(most).values, atol=TOLERANCE)
    total = sum(next(iter(entry.values())).logprob for entry in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(total)


def test_a_prompt_is_scored_over_http(app: Any, solo: LLM, reference: Any) -> None:
    """Twice: what the first time left in the prefix cache is not read the second time."""
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    with app.client() as http:
        first, second = (http.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    choice = first["choices"][0]
    ids = Tokenizer.load(model_path("demo")).encode(PROMPT)
    rows = log_softmax(reference, ids)
    expected = [float(rows[i - 1, ids[i]]) for i in range(1, len(ids))]
    reported = choice["logprobs"]["token_logprobs"]
    assert reported[0] is None and reported[1:] == pytest.approx(expected, abs=TOLERANCE)
    assert choice["text"] == PROMPT
    for token, offset in zip(
        choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True
    ):
        assert PROMPT[offset:].startswith(token)


def test_salts_keep_pages_apart(app: Any) -> None:
    """Pages are shared with requests of the same salt, and with no others."""
    body = {"prompt": "A quite long prompt, so that it fills some pages. " * 3, "max_tokens": 2}

    def cached(http: httpx.Client, salt: str) -> int:
        reply = http.post("/v1/completions", json={**body, "cache_salt": salt}).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    with app.client() as http:
        assert cached(http, "one") == cached(http, "two") == 0
        assert cached(http, "one") > 0


def test_choices_fork_and_keep_their_rules(solo: LLM) -> None:
    """Each choice is what its seed says alone, and its log probabilities are too."""
    settings: dict[str, Any] = {**SETTINGS["everything"], "logprobs": 2, "max_tokens": LENGTH}
    params = SamplingParams(n=3, prompt_logprobs=0, **settings)
    together = solo.generate(PROMPT, params, use_tqdm=False)[0]
    for index, choice in enumerate(together.outputs):
        alone = own(solo, **{**settings, "seed": settings["seed"] + index})
        assert (choice.text, choice.token_ids) == (alone.text, alone.token_ids)
        assert choice.logprobs is not None and alone.logprobs is not None
        for mine, theirs in zip(choice.logprobs, alone.logprobs, strict=True):
            assert mine.keys() == theirs.keys()
            for token, reported in mine.items():
                assert reported.logprob == pytest.approx(theirs[token].logprob, abs=TOLERANCE)
    assert together.prompt_logprobs is not None and together.prompt_logprobs[0] is None
    assert all(reported is not None for reported in together.prompt_logprobs[1:])


def test_the_models_own_defaults(solo: LLM, tmp_path: Path, model: str) -> None:
    """Where a call names no settings, and where they are not ignored."""
    folder = tmp_path / "model"
    shutil.copytree(model_path(model), folder)
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"temperature": 0.5, "repetition_penalty": 1.25, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"kv_cache_memory": 10**6, "device": "cpu", "max_model_len": 64}
    with LLM(str(folder), **settings) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.temperature, defaults.repetition_penalty) == (0.5, 1.25)
        assert len(llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].token_ids) <= 3
    with LLM(str(folder), generation_config="none", **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(InvalidConfig) as caught:
        LLM(str(folder), generation_config="maybe", **settings)
    assert caught.value.param == "generation_config"


def test_no_token_is_left(solo: LLM) -> None:
    """Settings that exclude each other end their own request, with a word that says why."""
    tokenizer = Tokenizer.load(model_path("demo"))
    (token,) = tokenizer.encode("a", False)
    params = [
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(max_tokens=4, allowed_token_ids=[token], bad_words=["a"]),
    ]
    with pytest.raises(InvalidRequest, match="no token is left") as caught:
        solo.generate([PROMPT] * 2, params, use_tqdm=False)
    assert caught.value.status == 400
    assert solo.generate(PROMPT, params[0], use_tqdm=False)[0].outputs[0].token_ids

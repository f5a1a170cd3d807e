"""What build_requests lets through, cuts and refuses."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfin.actors.errors import ContextLengthExceeded, InvalidConfig, InvalidRequest
from rayfin.actors.guidance import NO_END, Guidance
from rayfin.actors.media.part import MediaFacts, MediaInput
from rayfin.actors.messages import EngineInfo, EngineRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.build_requests import build_requests, sampling_defaults
from rayfin.deployments.text.tokenizer import Tokenizer

INFO = EngineInfo("engine", max_model_len=100, vocab_size=50, num_pages=10, page_size=8)
ROOMY = EngineInfo("engine", max_model_len=100, vocab_size=50, num_pages=1000, page_size=8)


def build(
    prompt: Any,
    info: EngineInfo = ROOMY,
    tokenizer: Tokenizer | None = None,
    guidance: Guidance | None = None,
    images: Sequence[MediaInput] = (),
    **params: Any,
) -> list[EngineRequest]:
    return build_requests(
        prompt,
        SamplingParams(**params),
        info,
        request_id="r",
        eos_token_ids={2},
        arrival=1.5,
        tokenizer=tokenizer,
        guidance=guidance,
        images=images,
    )


def test_choices_have_their_own_ids_and_seeds() -> None:
    requests = build([1, 2, 3], n=3, seed=5, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1)
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [request.sampling.seed for request in requests] == [5, 6, 7]
    request = requests[0]
    assert request.prompt.dtype == np.int32 and request.prompt.tolist() == [1, 2, 3]
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)
    assert (request.sampling.top_k, request.sampling.min_p, request.arrival) == (7, 0.1, 1.5)


def test_choices_name_the_first_as_their_sibling() -> None:
    first, *others = build([1, 2], n=3)
    assert first.parent_key is None
    assert [own.parent_key for own in others] == [first.key] * 2
    assert [own.key for own in others] == [first.key + 1, first.key + 2]
    assert build([1, 2])[0].key != first.key


def test_unseeded_choices_differ() -> None:
    assert len({request.sampling.seed for request in build([1], n=8)}) == 8


@pytest.mark.parametrize(
    ("info", "max_tokens", "expected"),
    [(ROOMY, None, 90), (ROOMY, 95, 90), (ROOMY, 5, 5), (INFO, None, 71), (INFO, 100, 71)],
)
def test_max_tokens_is_cut_to_the_room(
    info: EngineInfo, max_tokens: int | None, expected: int
) -> None:
    assert build([1] * 10, info, max_tokens=max_tokens)[0].stopping.max_tokens == expected


def test_stop_rules() -> None:
    rules = build([1], stop_token_ids=[7])[0].stopping
    assert (rules.stop_token_ids, rules.eos_token_ids) == ({2, 7}, {2})
    rules = build([1], stop_token_ids=[7], ignore_eos=True)[0].stopping
    assert (rules.stop_token_ids, rules.eos_token_ids) == ({7}, set())


GUIDED = Guidance("start: /a*/")


def test_ends_of_guided_requests_stay_in_the_stop_table() -> None:
    (request,) = build([1, 1], guidance=GUIDED, stop_token_ids=[7], ignore_eos=True)
    assert request.stopping.stop_token_ids == {2, 7}
    assert request.stopping.eos_token_ids == {2}  # no stop_reason
    assert request.part(Guidance) == replace(GUIDED, ends=(2,), ends_from=NO_END)


def test_guidance_says_from_where_ends_may_be_sampled() -> None:
    both = build([1, 1], guidance=GUIDED, stop_token_ids=[7], min_tokens=3, n=2)
    for request in both:
        assert request.part(Guidance) == replace(GUIDED, ends=(2,), ends_from=5)
        assert (request.sampling.banned, request.sampling.banned_until) == ((7,), 5)
    (plain,) = build([1, 1], guidance=GUIDED, min_tokens=3)
    assert (plain.sampling.banned, plain.sampling.banned_until) == ((), 0)
    assert build([1])[0].part(Guidance) is None


def test_min_tokens_bans_what_would_stop() -> None:
    sampling = build([1, 1], min_tokens=3, stop_token_ids=[7])[0].sampling
    assert (sampling.banned, sampling.banned_until) == ((2, 7), 5)
    assert build([1])[0].sampling.banned == ()


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code"),
    [
        ([], {}, "prompt", "empty_prompt"),
        ([1] * 100, {}, "prompt", "context_length_exceeded"),
        ([50], {}, "prompt", "invalid_token_id"),
        ([-1], {}, "prompt", "invalid_token_id"),
        ([2**70], {}, "prompt", "invalid_token_id"),
        ([-(2**70), 2**63], {}, "prompt", "invalid_token_id"),
        ([1.5], {}, "prompt", "invalid_type"),
        (["a"], {}, "prompt", "invalid_type"),
        ([True], {}, "prompt", "invalid_type"),
        ([[1], [1, 2]], {}, "prompt", "invalid_type"),
        ([1], {"max_tokens": None, "min_tokens": 100}, "min_tokens", "integer_above_max_value"),
        ([1], {"stop_token_ids": [50]}, "stop_token_ids", "invalid_token_id"),
        ([1], {"allowed_token_ids": [1, 50]}, "allowed_token_ids", "invalid_token_id"),
        ([1], {"logit_bias": {50: 1}}, "logit_bias", "invalid_token_id"),
        ([1], {"logprobs": 21}, "logprobs", "integer_above_max_value"),
        ([1], {"prompt_logprobs": -1}, "prompt_logprobs", "integer_above_max_value"),
        ([1], {"bad_words": ["a"]}, "bad_words", "invalid_value"),  # no tokenizer
        ([1], {"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids", "invalid_value"),
    ],
)
def test_refusals_name_the_field(prompt: Any, params: Any, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(prompt, **params)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_what_the_runner_is_told() -> None:
    first, second = build(
        [1, 2],
        n=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"3": 500},
        allowed_token_ids=[9, 3, 9],
        logprobs=4,
        prompt_logprobs=0,
    )
    sampling = first.sampling
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    assert penalties == (0.5, -0.5, 1.2)
    assert (sampling.logit_bias, sampling.allowed) == (((3, 100.0),), (3, 9))
    assert (sampling.logprobs, sampling.prompt_logprobs) == (4, 0)
    assert second.sampling.logprobs == 4 and second.sampling.prompt_logprobs is None
    assert build([1], allowed_token_ids=range(50))[0].sampling.allowed == ()


def test_all_log_probabilities_where_the_engine_tells_them() -> None:
    every = replace(ROOMY, max_logprobs=-1)
    sampling = build([1], every, logprobs=-1, prompt_logprobs=30)[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (50, 30)
    assert build([1], replace(ROOMY, max_logprobs=50), logprobs=-1)[0].sampling.logprobs == 50


def test_bad_words_begin_a_text_or_follow_a_space(byte_level: Tokenizer) -> None:
    roomy = replace(ROOMY, vocab_size=byte_level.vocab_size)
    words = ["quick", "  the", "world", "hello"]  # the last two have another length after a space
    token_strings = build([1], roomy, byte_level, bad_words=words)[0].sampling.bad_words

    def is_banned(text: str) -> bool:
        ids = tuple(byte_level.encode(text, False))
        return any(ids[-len(string) :] == string for string in token_strings)

    for word in map(str.lstrip, words):
        assert is_banned(word) and is_banned(f" {word}")
        assert not is_banned(word.capitalize()) and not is_banned(f"{word}.")
    with pytest.raises(InvalidRequest, match="no token is left"):
        build(
            [1],
            roomy,
            byte_level,
            bad_words=["hello"],
            allowed_token_ids=byte_level.encode("hello", False),
        )
    with pytest.raises(InvalidRequest, match="at most 128"):
        build([1], roomy, byte_level, bad_words=[str(i) for i in range(129)])


def test_a_salt_keeps_pages_apart() -> None:
    def keys(salt: str | None) -> tuple[str, ...]:
        params = SamplingParams()
        return build_requests(
            [1], params, ROOMY, request_id="r", eos_token_ids=(), cache_salt=salt
        )[0].extra_keys

    assert keys(None) == () and len({keys(None), keys("a"), keys("b")}) == 3


def test_a_prompt_of_more_pages_than_exist() -> None:
    assert build([1] * 80, INFO)[0].stopping.max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match="needs 11 cache pages"):
        build([1] * 81, INFO)


def test_the_models_sampling_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": None, "repetition_penalty": 1.1})
    )
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert sampling_defaults(tmp_path) == defaults
    file.write_text(json.dumps({"max_new_tokens": 7, "do_sample": True}))
    assert sampling_defaults(tmp_path) == {"max_tokens": 7}
    file.write_text(json.dumps({"temperature": 7}))
    with pytest.raises(InvalidConfig, match="generation_config.json"):
        sampling_defaults(tmp_path)
    assert sampling_defaults(tmp_path, {"temperature": 0.5}) == {"temperature": 0.5}
    assert sampling_defaults(None, {"max_new_tokens": 3, "eos_token_id": 4}) == {"max_tokens": 3}
    with pytest.raises(InvalidConfig, match="override_generation_config: .*top_p"):
        sampling_defaults(None, {"top_p": 7})


def test_a_model_that_writes_down_speech_wants_one_clip_in_front() -> None:
    info = replace(INFO, parts=(MediaFacts(token_id=3, front_tokens=8),))
    clip = MediaInput(b"a", 0, 8, {})
    made = build([3] * 8 + [5, 6], info, images=(clip,))
    assert made[0].parts == (clip,) and len(made[0].prompt) == 10
    later = MediaInput(b"a", 1, 8, {})
    short = MediaInput(b"a", 0, 7, {})
    for ids, clips in [
        ([5, 6], ()),
        ([3] * 8, (clip,)),
        ([5, *[3] * 8, 6], (later,)),
        ([3] * 7 + [5, 6], (short,)),
        ([3] * 16 + [5], (clip, MediaInput(b"b", 8, 8, {}))),
    ]:
        with pytest.raises(InvalidRequest, match="one clip of audio, then the tokens"):
            build(ids, info, images=clips)
    long = [3] * 8 + [5] * info.max_model_len
    with pytest.raises(ContextLengthExceeded, match=r"tokens \(8 of them for a clip\), however"):
        build(long, info, images=(clip,))

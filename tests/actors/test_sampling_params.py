"""Sampling parameters: ranges, defaults, names in errors."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfin import StructuredOutputs, StructuredOutputsParams
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import Repetition
from rayfin.actors.sampling_params import NO_SEED, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "name, value, code",
    [
        ("n", 0, "integer_below_min_value"),
        ("n", 16385, "integer_above_max_value"),
        ("n", True, "invalid_type"),
        ("n", 1.0, "invalid_type"),
        ("temperature", -0.1, "decimal_below_min_value"),
        ("temperature", 2.1, "decimal_above_max_value"),
        ("temperature", NAN, "invalid_value"),
        ("temperature", INF, "invalid_value"),
        ("temperature", "1", "invalid_type"),
        ("temperature", None, "invalid_type"),
        ("top_p", 0.0, "decimal_below_min_value"),
        ("top_p", 1.01, "decimal_above_max_value"),
        ("top_p", NAN, "invalid_value"),
        ("min_p", -0.1, "decimal_below_min_value"),
        ("min_p", 1.1, "decimal_above_max_value"),
        ("top_k", -2, "integer_below_min_value"),
        ("top_k", 2.5, "invalid_type"),
        ("seed", 2**63, "integer_above_max_value"),
        ("seed", -(2**63) - 1, "integer_below_min_value"),
        ("seed", False, "invalid_type"),
        ("max_tokens", 0, "integer_below_min_value"),
        ("max_tokens", "5", "invalid_type"),
        ("min_tokens", -1, "integer_below_min_value"),
        ("min_tokens", 17, "integer_above_max_value"),  # over max_tokens
        ("stop", [""], "invalid_value"),
        ("stop", "", "invalid_value"),
        ("stop", [3], "invalid_value"),
        ("stop_token_ids", [-1], "integer_below_min_value"),
        ("stop_token_ids", ["a"], "invalid_type"),
        ("presence_penalty", 2.1, "decimal_above_max_value"),
        ("presence_penalty", "1", "invalid_type"),
        ("frequency_penalty", -2.1, "decimal_below_min_value"),
        ("frequency_penalty", NAN, "invalid_value"),
        ("repetition_penalty", 0, "decimal_below_min_value"),
        ("repetition_penalty", -1.0, "decimal_below_min_value"),
        ("repetition_penalty", INF, "invalid_value"),
        ("logprobs", -2, "integer_below_min_value"),
        ("logprobs", False, "invalid_type"),
        ("prompt_logprobs", -2, "integer_below_min_value"),
        ("prompt_logprobs", 1.5, "invalid_type"),
        ("best_of", 0, "integer_below_min_value"),
        ("best_of", 16385, "integer_above_max_value"),
        ("best_of", True, "invalid_type"),
        ("logit_bias", [1], "invalid_type"),
        ("logit_bias", {"abc": 1}, "invalid_type"),
        ("logit_bias", {"-1": 1}, "integer_below_min_value"),
        ("logit_bias", {-1: 1}, "integer_below_min_value"),
        ("logit_bias", {1: NAN}, "invalid_value"),
        ("logit_bias", {1: "2"}, "invalid_type"),
        ("logit_bias", {i: 1.0 for i in range(1025)}, "invalid_value"),
        ("allowed_token_ids", [], "invalid_value"),
        ("allowed_token_ids", [-1], "integer_below_min_value"),
        ("allowed_token_ids", [True], "invalid_type"),
        ("bad_words", [""], "invalid_value"),
        ("bad_words", [3], "invalid_value"),
        ("truncate_prompt_tokens", 0, "integer_below_min_value"),
        ("truncate_prompt_tokens", -2, "integer_below_min_value"),
        ("truncate_prompt_tokens", 2.0, "invalid_type"),
        ("extra_args", {"x": 1}, "unsupported_parameter"),
        ("flat_logprobs", True, "unsupported_parameter"),
        ("logprob_token_ids", [-1], "integer_below_min_value"),
        ("logprob_token_ids", [3] * 129, "array_above_max_length"),
        ("structured_outputs", "a+", "invalid_type"),
        ("thinking_token_budget", 5, "unsupported_parameter"),
        ("repetition_detection", 5, "invalid_type"),
    ],
)
def test_refused(name: str, value: Any, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.code == code
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"n": 16384},
        {"temperature": 0},
        {"temperature": 2.0, "top_p": 1, "min_p": 1.0, "top_k": 10**6},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 3, "min_tokens": 3},
        {"stop": ["a"] * 100},
        {"logprob_token_ids": [3, 4], "logprobs": 2},
        {"best_of": 2, "n": 2},
        {"best_of": 5, "n": 2},
        {"best_of": 1, "temperature": 0},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
        {"logprobs": -1, "prompt_logprobs": 0},
        {"logit_bias": {}, "bad_words": [], "extra_args": {}},
        {"flat_logprobs": False, "logprob_token_ids": [], "thinking_token_budget": -1},
        {"bad_words": [str(i) for i in range(500)]},  # counted once they are tokens
        {"allowed_token_ids": [0], "truncate_prompt_tokens": -1},
        {"presence_penalty": 0, "repetition_penalty": 1, "frequency_penalty": 0.0},
    ],
)
def test_accepted(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_normal_forms() -> None:
    params = SamplingParams(temperature=1e-6, top_k=-1, stop="end", stop_token_ids=(3, 4))
    assert params.temperature == 0.0 and params.greedy
    assert params.top_k == 0 and params.stop == ["end"] and params.stop_token_ids == [3, 4]
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert not SamplingParams().greedy
    assert SamplingParams(seed=-1).seed is None
    biases = SamplingParams(logit_bias={"7": 200, 8: -101.5, 9: 1}).logit_bias
    assert biases == {7: 100.0, 8: -100.0, 9: 1.0}
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(bad_words="no").bad_words == ["no"]
    assert SamplingParams(bad_words=["no", "yes", "no"]).bad_words == ["no", "yes"]
    params = SamplingParams(logprobs=True, prompt_logprobs=True)  # as vLLM reads it
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)


def test_best_of_is_no_less_than_n_and_not_greedy() -> None:
    for values in ({"n": 3, "best_of": 2}, {"best_of": 2, "temperature": 0}):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**values)
        assert caught.value.param == "best_of"


def test_greedy_has_one_choice() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(n=2, temperature=0.0)
    assert caught.value.param == "n"


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"


@given(
    seed=st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != NO_SEED),
    index=st.integers(0, 127),
)
def test_fixed_seed(seed: int, index: int) -> None:
    """Fits an int64 that is not negative, repeats, and differs from choice to choice."""
    params = SamplingParams(seed=seed)
    fixed = params.fixed_seed(index)
    assert 0 <= fixed < 2**63
    assert fixed == params.fixed_seed(index) != params.fixed_seed(index + 1)


def test_fresh_seeds_differ() -> None:
    params = SamplingParams()
    assert len({params.fixed_seed() for _ in range(20)}) == 20
    assert all(0 <= params.fixed_seed() < 2**63 for _ in range(20))


def test_structured_outputs_as_a_dict_or_the_class() -> None:
    made = SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs
    assert made == StructuredOutputs(regex="a+") == StructuredOutputsParams(regex="a+")
    assert SamplingParams(structured_outputs=made).structured_outputs is made
    assert SamplingParams().structured_outputs is None
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(structured_outputs={"regexp": "a+"})
    assert (caught.value.param, caught.value.code) == ("structured_outputs.regexp", "invalid_value")


@pytest.mark.parametrize(
    ("rule", "param"),
    [
        ({"max_pattern_size": 3}, "repetition_detection.min_count"),
        ({"max_pattern_size": 3, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": 2, "min_pattern_size": 3}, "repetition_detection.min_pattern_size"),
        ({"max_pattern_size": 1025, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": -1}, "repetition_detection.max_pattern_size"),
        ({"max": 3}, "repetition_detection.max"),
    ],
)
def test_repetition_is_refused(rule: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(repetition_detection=rule)
    assert caught.value.param == param


def test_repetition() -> None:
    asked = {"max_pattern_size": 5, "min_count": 3}
    assert SamplingParams(repetition_detection={"min_count": 2}).repetition_detection is None
    for rule in (asked, SimpleNamespace(**asked, min_pattern_size=0)):
        params = SamplingParams(repetition_detection=rule, min_tokens=2)  # type: ignore[arg-type]
        assert params.repetition_detection == Repetition(5, 1, 3, 2)


def test_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={3: 1.0}, temperature=0.5, seed=7)
    copied = params.clone()
    assert copied == params
    copied.stop.append("b")  # type: ignore[union-attr]
    copied.temperature = 0.0
    assert params.stop == ["a"] and params.temperature == 0.5


def test_from_optional_takes_none_for_the_default() -> None:
    """As in vLLM, which is given None for what a request has not; ``max_tokens`` stays None."""
    names = ("n", "temperature", "top_p", "top_k", "presence_penalty", "logit_bias", "stop", "seed")
    assert SamplingParams.from_optional(**dict.fromkeys(names)) == SamplingParams()
    made = SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None)
    assert made == SamplingParams(top_p=0.5, max_tokens=None)
    with pytest.raises(InvalidRequest, match="top_p"):
        SamplingParams.from_optional(top_p=2.0)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("logits_processors", [print], "logit_bias"),
        ("guided_decoding", object(), "structured_outputs"),
        ("use_beam_search", True, "LLM.beam_search"),
        ("skip_reading_prefix_cache", True, "cache_salt"),
    ],
)
def test_fields_of_vllm_that_are_refused_name_what_is_near(
    name: str, value: Any, near: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} is not supported.*{near}") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    nothing: dict[str, Any] = {name: None, "output_kind": 2, "skip_clone": True}
    assert SamplingParams(**nothing).n == 1

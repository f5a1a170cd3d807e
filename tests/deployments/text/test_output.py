"""One request's text: stop strings, stop tokens, min_tokens, what never leaks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.text.output import OutputText
from rayfin.deployments.text.tokenizer import Tokenizer


def output(tokenizer: Tokenizer, params: SamplingParams, stop_ids: set[int]) -> OutputText:
    request = EngineRequest(
        "r", np.array([5], np.int32), Sampling(), StopRules(99, frozenset(stop_ids))
    )
    return OutputText(tokenizer, params, request)


def test_a_stop_string_cuts_text_and_tokens(byte_level: Tokenizer) -> None:
    text = output(byte_level, SamplingParams(stop="\n\n"), set())
    ids = byte_level.encode("one\n\ntwo")
    result = text.push(TokenDelta("r", ids, "length"))
    assert (result.text, result.finish_reason, result.stop_reason) == ("one", "stop", "\n\n")
    assert byte_level.decode(result.token_ids) == "one\n\n"
    assert text.finished and text.push(TokenDelta("r", ids)).text == ""


def test_the_stop_string_is_kept_on_request(byte_level: Tokenizer) -> None:
    params = SamplingParams(stop=["EN", "END"], include_stop_str_in_output=True)
    result = output(byte_level, params, set()).push(TokenDelta("r", byte_level.encode("x END y")))
    assert (result.text, result.stop_reason) == ("x EN", "EN")


@pytest.mark.parametrize(("include", "expected"), [(False, "go"), (True, "go.")])
def test_a_stop_token_is_counted_and_not_shown(
    byte_level: Tokenizer, include: bool, expected: str
) -> None:
    ids = byte_level.encode("go.")
    params = SamplingParams(include_stop_str_in_output=include)
    result = output(byte_level, params, {ids[-1]}).push(TokenDelta("r", ids, "stop", ids[-1]))
    assert (result.text, result.token_ids, result.stop_reason) == (expected, ids, ids[-1])


def test_held_text_comes_with_the_last_delta(byte_level: Tokenizer) -> None:
    text = output(byte_level, SamplingParams(stop="abc"), set())
    assert text.push(TokenDelta("r", byte_level.encode("ab"))).text == ""
    assert text.push(TokenDelta("r", [], "length")).text == "ab"


def test_min_tokens_disarms_stop_strings(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a b a b")
    assert len(ids) > 4
    text = output(byte_level, SamplingParams(stop="b", min_tokens=4), set())
    result = text.push(TokenDelta("r", ids, "length"))
    assert (result.text, result.stop_reason) == ("a b a ", "b")


def test_without_detokenize_there_is_no_text(byte_level: Tokenizer) -> None:
    text = output(byte_level, SamplingParams(detokenize=False), set())
    result = text.push(TokenDelta("r", [40, 41], "length", None, 7))
    assert (result.text, result.token_ids, result.finish_reason) == ("", [40, 41], "length")
    assert result.cached_tokens == 7


@settings(max_examples=150)
@given(data=st.data(), stops=st.lists(st.sampled_from(["a", "the", "é", "\n", "o w"]), max_size=3))
def test_the_size_of_deltas_changes_nothing(
    byte_level: Tokenizer, data: st.DataObject, stops: list[str]
) -> None:
    ids = data.draw(st.lists(st.integers(3, byte_level.vocab_size - 1), max_size=30))
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=30, max_size=30))

    def run(steps: list[int]) -> tuple[str, list[int], object]:
        text = output(byte_level, SamplingParams(stop=stops), set())
        joined, tokens, rest = "", [], list(ids)
        while not text.finished:
            size = steps.pop() if steps else 1
            last = "length" if size >= len(rest) else None
            result = text.push(TokenDelta("r", rest[:size], last))
            rest = rest[size:]
            joined, tokens = joined + result.text, tokens + result.token_ids
        return joined, tokens, result.stop_reason

    assert run(list(sizes)) == run([])


def test_half_a_character_at_the_end_is_left_out(byte_level: Tokenizer) -> None:
    """Of an answer that was cut; a model that ends there has written no character."""
    ids = byte_level.encode("ok 漢")[:-1]
    cut = output(byte_level, SamplingParams(), set()).push(TokenDelta("r", ids, "length"))
    assert (cut.text, cut.token_ids) == ("ok ", ids)
    ended = output(byte_level, SamplingParams(), set()).push(TokenDelta("r", ids, "stop"))
    assert ended.text == "ok \ufffd"

"""Every form of a prompt through the one function that reads them."""

from typing import Any

import pytest

from rayfin.actors.errors import ContextLengthExceeded, InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.prompt_forms import (
    check_salt,
    prompt_ids,
    read_prompts,
    truncated,
)
from rayfin.deployments.text.tokenizer import Tokenizer

TEXT = "hello world"


@pytest.mark.parametrize("listed", [False, True])
def test_three_forms_are_one_prompt(byte_level: Tokenizer, listed: bool) -> None:
    ids = byte_level.encode(TEXT)
    for form in (TEXT, ids, {"prompt": TEXT}, {"prompt_token_ids": ids}, tuple(ids)):
        value: Any = [form] if listed else form
        (prompt,) = read_prompts(value)
        assert prompt_ids(prompt, byte_level) == ids
        assert prompt.param == ("prompt[0]" if listed else "prompt")


def test_several(byte_level: Tokenizer) -> None:
    forms = [TEXT, {"prompt": "you", "cache_salt": "s"}]
    prompts = read_prompts(forms)
    assert [prompt.text for prompt in prompts] == [TEXT, "you"]
    assert [prompt.cache_salt for prompt in prompts] == [None, "s"]
    mixed = read_prompts([TEXT, [1, 2], {"prompt_token_ids": [3], "prompt": "3"}], mixed=True)
    assert [prompt.ids for prompt in mixed] == [None, [1, 2], [3]]


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        (None, "prompt", "invalid_type"),
        (5, "prompt", "invalid_type"),
        ([], "prompt", "empty_array"),
        ("", "prompt", "empty_prompt"),
        ([""], "prompt[0]", "empty_prompt"),
        ([[]], "prompt[0]", "empty_array"),
        ([[1], "a"], "prompt[1]", "invalid_type"),
        (["a", {"prompt_token_ids": [1]}], "prompt[1]", "invalid_type"),
        ([True], "prompt[0]", "invalid_type"),
        ([1, "a"], "prompt[1]", "invalid_type"),
        ([[1, 2.0]], "prompt[0][1]", "invalid_type"),
        ({}, "prompt", "invalid_type"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompt", "invalid_type"),
        ({"prompt": [1]}, "prompt.prompt", "invalid_type"),
        ({"prompt": ""}, "prompt.prompt", "empty_prompt"),
        ({"prompt_token_ids": "a"}, "prompt.prompt_token_ids", "invalid_type"),
        ({"prompt_token_ids": []}, "prompt.prompt_token_ids", "empty_array"),
        ([{"prompt_token_ids": [None]}], "prompt[0].prompt_token_ids[0]", "invalid_type"),
        ({"prompt": "a", "cache_salt": "a/b"}, "prompt.cache_salt", "invalid_value"),
        (["a"] * 4, "prompt", "array_above_max_length"),
    ],
)
def test_refusals_name_the_place(value: Any, param: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_prompts(value, max_prompts=3)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_texts_need_a_tokenizer_and_room(byte_level: Tokenizer) -> None:
    (prompt,) = read_prompts("a" * 1000)
    with pytest.raises(InvalidRequest, match="needs a tokenizer"):
        prompt_ids(prompt, None)
    with pytest.raises(
        ContextLengthExceeded,
        match=r"\d+ tokens \(1000 characters\).*, or set trunc",
    ):
        prompt_ids(prompt, byte_level, 10)
    assert prompt_ids(read_prompts([[1, 2]])[0], None) == [1, 2]


def test_truncation() -> None:
    ids = list(range(10))

    def cut(most: int | None, side: Any = "left", **params: Any) -> list[int]:
        return truncated(ids, SamplingParams(truncate_prompt_tokens=most, **params), 20, side)

    assert cut(None) == cut(20) == ids
    assert cut(3) == [7, 8, 9] and cut(3, "right") == [0, 1, 2]
    assert cut(-1, max_tokens=16) == [6, 7, 8, 9]
    assert cut(-1, max_tokens=None) == ids and cut(-1, max_tokens=19) == [9]
    ids *= 3
    assert len(cut(-1, max_tokens=None)) == 19  # room for one more
    assert len(cut(-1, max_tokens=100)) == 10  # max_tokens is cut to the rest
    with pytest.raises(InvalidRequest, match="at most 20"):
        cut(21)


@pytest.mark.parametrize("salt", ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", 5])
def test_bad_salts(salt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_salt(salt)
    assert caught.value.param == "cache_salt"


def test_a_good_salt() -> None:
    assert check_salt("tenant-7 é") == "tenant-7 é"
